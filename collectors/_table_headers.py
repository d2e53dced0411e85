"""What a column of a request table means and which unit its header names, in any spelling."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

from pdtrace.records import dataclass

# Unit words of headers and cells -> the unit; durations only.
DURATION_UNITS = {
    "s": "s",
    "sec": "s",
    "secs": "s",
    "second": "s",
    "seconds": "s",
    "초": "s",
    "秒": "s",
    "sek": "s",
    "sekunde": "s",
    "sekunden": "s",
    "secondes": "s",
    "segundos": "s",
    "ms": "ms",
    "msec": "ms",
    "msecs": "ms",
    "millis": "ms",
    "millisecond": "ms",
    "milliseconds": "ms",
    "밀리초": "ms",
    "毫秒": "ms",
    "ミリ秒": "ms",
    "millisekunden": "ms",
    "millisecondes": "ms",
    "milisegundos": "ms",
    "us": "us",
    "usec": "us",
    "micros": "us",
    "microsecond": "us",
    "microseconds": "us",
    "ns": "ns",
    "nsec": "ns",
    "nanos": "ns",
    "nanosecond": "ns",
    "nanoseconds": "ns",
    "m": "min",
    "mins": "min",
    "minute": "min",
    "minutes": "min",
}
UNIT_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}

# A secret: stored as a hash only.
KEY_MEANING = "tenant_key"
_ASKED = {"tenant", KEY_MEANING, "route"}  # who asked for what makes no table one of requests
_STATISTICS = re.compile(
    r"(?:^|_)(?:p\d{1,4}|median|std|stdev|stddev|var|variance|min|max|percentile|quantile|histogram|"
    r"bucket|slo|target|limit|threshold|timeout)(?:_|$)"
)
_MEAN = re.compile(r"(?:^|_)(?:mean|avg|average)(?:_|$)")

_TOKENS = r"(?:tok(?:en)?s?|トークン|jetons?)"
_PROMPT = r"(?:input|prompt|context|request|req|query|in|입력|프롬프트|요청|输入|提示|入力|eingabe|entrée|entrada)"
_OUTPUT = (
    r"(?:output|completion|generated|generation|gen|response|resp|answer|reply|decoded?|new|out|"
    r"출력|생성|응답|输出|生成|回复|出力|ausgabe|antwort|sortie|salida)"
)
_COUNT = r"(?:n_|num_|number_|number_of_|nb_|no_of_|count_|usage_|actual_)?"
_LENGTH = rf"(?:{_TOKENS}(?:_count|_len|_length|_num)?|len|length|sequence_length|seq_len|토큰(?:_수|수)?|长度|トークン数|tokenzahl|tokenanzahl)"
_FIRST = r"(?:first|1st)_?(?:output_|generated_|answer_)?_?(?:token|chunk|byte|word|response)"

# meaning -> spelling of the header's words (joined by _, unit words taken off); the first that fits
# wins, and of two columns with one meaning the one whose rule position is earlier.
_RULES: tuple[tuple[str, str], ...] = (
    (
        "note",
        r"(?:note|comment|remark|label|memo)s?|비고|메모|주석|备注|注释|说明|備考|メモ|bemerkung(?:en)?|notiz(?:en)?|kommentar|anmerkung|remarque|commentaire|nota|comentario",
    ),
    ("external_id", r"x_request_id|http_request_id|client_request_id|x_client_request_id"),
    ("traceparent", r"trace_?parent"),
    ("trace_id", r"trace_?id"),
    ("span_id", r"span_?id"),
    ("parent_span_id", r"parent_(?:span_)?id"),
    ("remote_id", r"remote_request_id"),
    (
        "session",
        r"(?:session|conversation|chat|thread|dialogue?)(?:_?id)?|세션|대화|会话(?:_?id)?|sitzung|セッション",
    ),
    ("turn", r"turn(?:_?(?:index|id|no|number))?|round(?:_?(?:index|id))?|轮次"),
    (
        "total_tokens",
        rf"(?:usage_)?(?:n_|num_|number_)?total_{_TOKENS}|{_TOKENS}_total|총_?토큰(?:_?수)?|总_?{_TOKENS}(?:数)?",
    ),
    ("max_tokens", rf"max_(?:new_|output_|completion_|gen_)?{_TOKENS}|max_output_len(?:gth)?"),
    (
        "cached_tokens",
        rf"(?!.*(?:creat|miss|writ|saved)).*cach.*{_TOKENS}(?:_count)?|cached(?:_(?:input|prompt|prefix|len|length))*|zwischengespeicherte_tokens|캐시_?토큰(?:_?수)?|缓存_?(?:{_TOKENS}(?:数)?|命中)",
    ),
    ("cache_hit_ratio", r"(?:kv_|prefix_)*cache_(?:hit_)?(?:rate|ratio|percent|pct)|kv_hit_rate"),
    (
        "first_at",
        rf"(?:t|ts|timestamp)_{_FIRST}|{_FIRST}_(?:at|ts|timestamp|unix|epoch|instant|received|recv)|completion_start_?(?:time)?",
    ),
    ("ttft", r"(?:client_|request_)?ttft(?:_(?:latency|time|value))?"),
    (
        "ttft",
        rf"time_to_(?:the_)?{_FIRST}|{_FIRST}(?:_(?:latency|time|delay|wait|duration))*|(?:latency|delay|wait)_(?:to_|of_)?{_FIRST}",
    ),
    (
        "ttft",
        r"첫_?(?:번째_)?토큰(?:_?(?:지연|시간|지연_?시간|latency))?|首_?(?:token|字|包|个token)_?(?:延迟|时间|耗时|时延|latency)?|ttfb",
    ),
    (
        "ttft",
        r"(?:zeit|latenz|dauer)_bis(?:_zum)?_erste[nsrm]?_(?:token|chunk)|erste[rsn]?_token(?:_(?:zeit|latenz))?|最初のトークン(?:まで(?:の時間)?)?|初回トークン(?:時間|遅延|レイテンシ)?|(?:temps|délai)_(?:jusqu_au|avant_le|du)_premier_(?:token|jeton)|tiempo_(?:hasta_el|al)_primer_token",
    ),
    (
        "itl",
        r"itls?|tbts?|inter_?(?:token|chunk)_(?:latenc(?:y|ies)|times?|gaps?|delays?)|(?:token|chunk)_(?:gaps?|intervals?|deltas?)|토큰_?간격",
    ),
    (
        "tpot",
        r"(?:avg_|mean_|average_)?(?:tpot|itl|tbt|inter_?token(?:_(?:latency|time|delay|gap))?|inter_chunk_latency)|time_per_(?:output_)?token|time_between_tokens|(?:latency|time|ms|s|sec)_per_(?:output_)?tok(?:en)?",
    ),
    (
        "tps",
        rf"(?:(?:output|generation|gen|decode|request_output|request|user|avg|mean|out)_)?(?:throughput_|speed_|rate_)?(?:{_TOKENS}_(?:per_)?s(?:ec(?:ond)?s?)?|tps|t_per_s)(?:_(?:per_)?user)?",
    ),
    (
        "tps",
        rf"(?:(?:output|generation|gen|decode|token|request_output|out)_)?(?:throughput|speed)(?:_{_TOKENS}_(?:per_)?s(?:ec(?:ond)?s?)?)?|tokens?_pro_sekunde|(?:초당_?)토큰(?:_?수)?|처리량|속도|生成速度|吞吐(?:量)?",
    ),
    (
        "chunk_times",
        r"(?:chunk|token)s?_?(?:unix|times?|timestamps?|ts|instants|at|arrivals?|arrival_times|received_at)?|response_timestamps|output_token_(?:times|timestamps)",
    ),
    (
        "prompt_tokens",
        rf"{_COUNT}{_PROMPT}_?{_LENGTH}|{_TOKENS}_(?:in|input|prompt)|isl|{_COUNT}(?:input|prompt)_?{_LENGTH}_count",
    ),
    (
        "prompt_tokens",
        r"(?:tokens|jetons)_(?:de_|d_)?(?:entrada|entrée)|n_in|(?:input|prompt|context)",
    ),
    (
        "output_tokens",
        rf"{_COUNT}{_OUTPUT}_?{_LENGTH}|{_TOKENS}_(?:out|output|generated|completion)|osl|n_gen",
    ),
    (
        "output_tokens",
        r"(?:tokens|jetons)_(?:de_)?(?:salida|sortie)|n_out|output|completion|generated|response|answer",
    ),
    (
        "queue_time",
        r"queue(?:d|ing)?(?:_(?:time|wait|latency|delay|duration))*|대기_?시간|排队(?:时间)?",
    ),
    ("prefill_time", r"prefill(?:_(?:time|latency|duration))*"),
    (
        "kv_transfer_time",
        r"kv_?(?:cache_)?(?:transfer|transmission)(?:_(?:time|latency|duration))*",
    ),
    ("decode_time", r"(?:decode|decoding|generation)_(?:time|latency|duration)|decode"),
    ("e2e", r"(?:e2e|e2el|end_to_end|end2end)(?:_(?:latency|time|duration))*"),
    (
        "e2e",
        r"(?:total|overall|full|whole|complete)_(?:request_|response_)?(?:latency|time|duration|elapsed|elapsed_time)|time_total|총_?(?:지연|지연_?시간|시간|소요_?시간)|전체_?(?:지연|시간|응답_?시간)|总(?:延迟|耗时|时间|时延|用时)|gesamt_?(?:zeit|dauer|latenz)|合計時間|総時間|全体時間|(?:temps|durée|latence)_totale?|(?:tiempo|latencia|duración)_total",
    ),
    (
        "e2e",
        r"(?:request_)?(?:latency|duration|elapsed|elapsed_time)|(?:request|response)_(?:time|latency|duration)|time_taken|took|wall_time|지연|지연_?시간|응답_?시간|소요_?시간|延迟|耗时|响应时间|时延|用时|dauer|latenz|antwort_?zeit|レイテンシ|応答時間|durée|latence|latencia|duración",
    ),
    ("e2e", r"total|latency_total|ttlt|time_to_(?:the_)?last_token|last_token_(?:latency|time)"),
    (
        "start",
        r"(?:client_)?(?:t_|ts_|time_|timestamp_)?(?:start|started|begin|arrival|arrived|sent|send|submit|submitted|request_start|request_sent)(?:_?(?:time|at|ts|timestamp|unix|epoch))*|request_(?:time|timestamp)|시작_?(?:시각|시간)?|开始(?:时间)?|请求时间|startzeit|beginn|開始(?:時刻|時間)?",
    ),
    (
        "start",
        r"created(?:_?(?:at|time))?|time_?stamp|time_?generated|datetime|date_time|ts|date|time|t|시각|시간|일시|时间|时间戳|zeitstempel|zeitpunkt|uhrzeit|datum|日時",
    ),
    (
        "end",
        r"(?:t_|ts_|time_|timestamp_)?(?:end|ended|finish|finished|done|complete|completed|request_end|last_(?:token|chunk|byte))(?:_?(?:time|at|ts|timestamp|unix|epoch))*|completion_time|종료_?(?:시각|시간)?|结束(?:时间)?|endzeit|ende|終了(?:時刻|時間)?",
    ),
    (
        "http_status",
        r"(?:http_?)?(?:response_)?(?:status_?code|http_?code|http_?status|response_?code|code)|(?:decode|prefill|upstream)_status",
    ),
    ("status", r"status|state|outcome|result|success|succeeded|ok|상태|결과|状态|结果"),
    ("aborted", r"(?:was_|is_)?(?:cancell?ed|aborted)"),
    (
        "error",
        r"(?:error|err|exception|failure)(?:_(?:code|type|kind|name|class|msg|message|str|reason))?|에러|오류|错误|fehler|エラー|erreur",
    ),
    ("finish_reason", r"(?:finish|stop)_reason"),
    ("streaming", r"(?:is_)?stream(?:ed|ing)?"),
    ("tenant", r"tenant(?:_?(?:id|name))?|테넌트|租户"),
    ("tenant", r"(?:customer|org|organi[sz]ation|account|team)(?:_?(?:id|name|alias))?|고객|客户"),
    ("tenant", r"(?:end_?)?user(?:_?(?:id|name|hash))?|사용자|用户"),
    (KEY_MEANING, r"(?:virtual_|user_)?(?:api_?)?key(?:_?(?:hash|alias|id|name))?|authorization"),
    (
        "route",
        r"(?:http_|api_)?(?:route|path|endpoint|target)|url_path|request_(?:path|route)|경로|路由",
    ),
    ("model", r"model(?:_?(?:name|id))?|모델|模型|modell|モデル|modèle|modelo"),
    (
        "rank",
        r"(?:routed_|decode_)?(?:dp|data_parallel)_?rank(?:_?(?:id|index))?|engine_(?:index|idx|rank)",
    ),
    (
        "worker",
        r"(?:worker|host|hostname|instance|pod|replica|node|server|backend|upstream)(?:_?(?:id|name|host|addr|address))?|워커|서버|节点|实例|服务器",
    ),
    (
        "request_id",
        r"(?:request|req|call|completion|response|litellm_call|generation)_?id|rid|uuid|guid|요청_?(?:id|번호)|请求_?(?:id|编号)|anfrage_?(?:id|nr|nummer)|リクエスト_?(?:id|番号)",
    ),
    ("request_id", r"id|request|req|요청|请求|anfrage|リクエスト|requête|solicitud|petición"),
    ("row_id", r"index|idx|row|no|number|nr|번호|순번|序号|编号"),
)


@cache
def _rules() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """The rules, compiled when the first table asks: most runs read none."""
    return tuple((meaning, re.compile(rule)) for meaning, rule in _RULES)


# Parents of nested JSON keys whose members mean the same as at the top level.
_OPEN_PARENTS = re.compile(
    r"usage|usage_object|metadata|request|response|timings?|stats|latency|latencies|tokens|data|info|"
    r"result|client|prompt_tokens_details|input_tokens_details|attributes|error"
)
# A proxy's record of the prefill call: its prompt is the request's prompt, its one output token is not.
_PREFILL_USAGE = re.compile(r"prefill_usage")

DURATIONS = (
    "ttft",
    "e2e",
    "tpot",
    "itl",
    "queue_time",
    "prefill_time",
    "kv_transfer_time",
    "decode_time",
)
INSTANTS = ("start", "first_at", "end", "chunk_times")
_ANSWER = {
    "ttft",
    "first_at",
    "itl",
    "tpot",
    "tps",
    "prompt_tokens",
    "output_tokens",
    "chunk_times",
}
_TIMES_AND_COUNTS = _ANSWER | {"e2e"}
_MULTIPLE = {"http_status", "status", "error", "request_id"}  # several columns of these may be read
_LOG_KEYS = {"level", "severity", "lvl", "msg", "message", "logger", "levelname", "log"}


@dataclass(frozen=True)
class Column:
    """One column that was understood."""

    name: str  # as in the file; nested JSON keys joined by .
    meaning: str
    unit: str | None  # unit that the header names; durations only
    rank: int  # position of the rule: smaller is the more telling spelling


def words_of(header: str) -> tuple[str, list[str]]:
    """The header's words in lower case joined by _, and what stood in brackets."""
    text = (
        unicodedata.normalize("NFKC", header)
        .replace("μ", "u")
        .replace("µ", "u")
        .strip("\ufeff \t\"'`*")
    )
    brackets = re.findall(r"[(\[{<]([^()\[\]{}<>]*)[)\]}>]", text)
    text = re.sub(r"[(\[{<][^()\[\]{}<>]*[)\]}>]", " ", text)
    return _join(text), [_join(inner) for inner in brackets]


def _join(text: str) -> str:
    text = re.sub(r"(TTFT|TPOT|ITL|TBT|TPS|E2EL?)(?=[a-z])", r"\1_", text)
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=\d)(?=[A-Z][a-z])", "_", text)
    text = text.replace("/", " per ").replace("%", " percent ").replace("#", " number ")
    return "_".join(re.findall(r"\w+", text.lower().replace("_", " ")))


def understand(name: str) -> Column | None:
    """The meaning of one header, or None."""
    *parents, last = re.split(r"\.(?=\S)", name) if "." in name else [name]
    if any(not _open(parent, last) for parent in parents):
        return None
    key, brackets = words_of(last)
    unit = next((DURATION_UNITS[b] for b in brackets if b in DURATION_UNITS), None)
    if any(_STATISTICS.search(b) or _MEAN.search(b) for b in brackets):
        return None
    for candidate in (*(f"{key}_{b}" for b in brackets if "per" in b.split("_")), key):
        if found := _lookup(candidate):
            meaning, rank = found
            if meaning in ("tps", "note", "max_tokens"):
                return Column(name, meaning, None, rank)
    stem, suffix = _split_unit(key)
    found = (_lookup(stem) if suffix else None) or _lookup(key)
    if found is None or found[0] in ("tps", "max_tokens"):
        return None
    meaning, rank = found
    if meaning in DURATIONS or meaning in INSTANTS:
        if _STATISTICS.search(stem) or (_MEAN.search(stem) and meaning not in ("tpot", "itl")):
            return None
        return Column(name, meaning, unit or suffix, rank)
    if _STATISTICS.search(key) or _MEAN.search(key):
        return None
    return Column(name, meaning, None, rank)


def _open(parent: str, last: str) -> bool:
    key, _ = words_of(parent)
    if _PREFILL_USAGE.fullmatch(key):
        return words_of(last)[0] in ("prompt_tokens", "input_tokens", "cached_tokens")
    if key == "kv_transfer_params":
        return words_of(last)[0] == "remote_request_id"
    return bool(_OPEN_PARENTS.fullmatch(key))


def _split_unit(key: str) -> tuple[str, str | None]:
    """The key without its unit word: the last word, or an unmistakable one inside."""
    parts = key.split("_")
    if len(parts) > 1 and parts[-2] != "per":
        if parts[-1] in DURATION_UNITS and parts[-1] != "m":
            return "_".join(parts[:-1]), DURATION_UNITS[parts[-1]]
        for position, part in enumerate(parts[1:-1], start=1):
            if part in ("ms", "msec", "us", "ns", "sec", "seconds", "milliseconds"):
                return "_".join(parts[:position] + parts[position + 1 :]), DURATION_UNITS[part]
    return key, None


def _lookup(key: str) -> tuple[str, int] | None:
    for rank, (meaning, rule) in enumerate(_rules()):
        if rule.fullmatch(key):
            return meaning, rank
    return None


def meaning_of(key: str) -> str | None:
    """What the words of a header (joined by _) mean, whatever unit stands among them."""
    stem, unit = _split_unit(key)
    found = (_lookup(stem) if unit else None) or _lookup(key)
    return found[0] if found else None


def understand_all(names: Sequence[str]) -> list[Column]:
    """The columns that were understood, best spelling first where several share a meaning."""
    found = [column for name in names if (column := understand(name))]
    return sorted(found, key=lambda c: (c.name.count("."), c.rank, names.index(c.name)))


def is_request_table(names: Sequence[str]) -> bool:
    """At least two request columns, one of them a latency or a token count, and no plain log line."""
    found = understand_all(names)
    found = [c for c in found if c.meaning not in _ASKED]
    meanings = {c.meaning for c in found}
    if len({c.name for c in found}) < 2 or len(meanings) < 2:
        return False
    keys = {words_of(name)[0] for name in names}
    if keys & _LOG_KEYS and not (meanings & _ANSWER and "level" not in keys):
        return len(meanings & _ANSWER) >= 2
    return bool(meanings & _TIMES_AND_COUNTS)


def may_repeat(meaning: str) -> bool:
    """Whether several columns of this meaning are read together."""
    return meaning in _MULTIPLE
