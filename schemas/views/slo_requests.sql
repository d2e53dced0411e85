-- slo_requests: the class of limits that each request falls into, and which of them it met.
--
-- The first class whose conditions a request meets takes it. A condition on something that is not
-- known of the request is not met; such requests are marked `undecided`. What is unknown of a
-- latency stays unknown: a limit that is known to be missed makes the request miss all limits, one
-- that is not known leaves it open. An answer of one token has no pace: it meets any limit on time
-- per token and on gaps (`single`). Gaps are those of one observer's streams (view request_streams);
-- of several streams the worst counts.
--
-- grain:   one row per request; none where no limits were given
-- needs:   slo_classes, request_values, requests, request_streams
-- columns:
--   deployment     VARCHAR      deployment
--   request        VARCHAR      request
--   position       INTEGER      place of its class in the list; NULL where no class takes it
--   class          VARCHAR      name of its class
--   undecided      BOOLEAN      an earlier class asks for something that is not known of it
--   ended          VARCHAR      completed, failed (also rejected, timed out, aborted by the server), client_abort (aborted, nothing says by the server), unknown
--   single         BOOLEAN      it completed with at most one output token
--   ttft_ms        DOUBLE   ms  time to first token
--   tpot_ms        DOUBLE   ms  time per output token after the first
--   itl_ms         DOUBLE   ms  the quantile of its own gaps that its class names
--   e2e_ms         DOUBLE   ms  whole duration
--   ttft_limit_ms  DOUBLE   ms  limit of its class; NULL none
--   tpot_limit_ms  DOUBLE   ms  likewise
--   itl_limit_ms   DOUBLE   ms  likewise
--   e2e_limit_ms   DOUBLE   ms  likewise
--   ttft_met       BOOLEAN      the limit was met; true where there is none, NULL unknown
--   tpot_met       BOOLEAN      likewise
--   itl_met        BOOLEAN      likewise
--   e2e_met        BOOLEAN      likewise
--   all_met        BOOLEAN      all of them; NULL where one is unknown and none is missed
--   good           BOOLEAN      completed and all limits met; NULL unknown
WITH asked AS (
  SELECT
    v.deployment, v.request, v.outcome, v.counted, r.error, r.session, r.tenant, r.route,
    r.streaming, r.model, v.prompt_tokens, v.output_tokens, v.ttft_ms, v.tpot_ms, v.e2e_ms
  FROM request_values AS v
  JOIN requests AS r ON r.request = v.request
),
fits AS (
  SELECT
    a.request, c.position,
    (c.model IS NULL OR regexp_full_match(a.model, c.model))
      AND (c.tenant IS NULL OR regexp_full_match(a.tenant, c.tenant))
      AND (c.session IS NULL OR regexp_full_match(a.session, c.session))
      AND (c.route IS NULL OR regexp_full_match(a.route, c.route))
      AND (c.request IS NULL OR regexp_full_match(a.request, c.request))
      AND (c.streaming IS NULL OR a.streaming = c.streaming)
      AND (c.prompt_from_tokens IS NULL OR a.prompt_tokens >= c.prompt_from_tokens)
      AND (c.prompt_below_tokens IS NULL OR a.prompt_tokens < c.prompt_below_tokens) AS taken
  FROM asked AS a
  CROSS JOIN slo_classes AS c
),
placed AS (
  SELECT
    request, min(position) FILTER (taken) AS position, min(position) FILTER (taken IS NULL) AS open
  FROM fits
  GROUP BY request
),
classed AS (
  SELECT
    a.*, p.position, c.class, coalesce(p.open < coalesce(p.position, p.open + 1), false) AS undecided,
    c.ttft_ms AS ttft_limit_ms, c.tpot_ms AS tpot_limit_ms, c.itl_ms AS itl_limit_ms,
    c.e2e_ms AS e2e_limit_ms, c.itl_quantile
  FROM asked AS a
  JOIN placed AS p ON p.request = a.request
  LEFT JOIN slo_classes AS c ON c.position = p.position
),
gaps AS (
  SELECT
    s.request, list_sort(s.gaps_us) AS gaps, c.itl_quantile * (len(s.gaps_us) - 1) AS place
  FROM request_streams AS s
  JOIN classed AS c ON c.request = s.request
  WHERE c.itl_limit_ms IS NOT NULL
),
-- quantile_cont: between the values at the two ranks around quantile * (gaps - 1)
longest AS (
  SELECT
    request,
    max(
      gaps[CAST(floor(place) AS BIGINT) + 1]
      + (place - floor(place))
        * (gaps[CAST(ceil(place) AS BIGINT) + 1] - gaps[CAST(floor(place) AS BIGINT) + 1])
    ) / 1e3 AS itl_ms
  FROM gaps
  GROUP BY request
),
ended AS (
  SELECT
    c.* EXCLUDE (outcome, counted, error), l.itl_ms,
    CASE
      WHEN c.outcome = 'completed' OR c.counted THEN 'completed'
      WHEN c.outcome = 'failed' THEN 'failed'
      WHEN c.outcome = 'aborted' AND regexp_matches(
        lower(coalesce(c.error, '')),
        'time.?out|timed|deadline|server|evict|preempt|shut|memory|oom|overload|reject|internal|^5\d\d$|^408$|^429$'
      ) THEN 'failed'
      WHEN c.outcome = 'aborted' THEN 'client_abort'
      ELSE 'unknown'
    END AS ended,
    c.output_tokens <= 1 AS one_token
  FROM classed AS c
  LEFT JOIN longest AS l ON l.request = c.request
),
judged AS (
  SELECT
    *,
    coalesce(one_token AND ended = 'completed', false) AS single,
    CASE WHEN ttft_limit_ms IS NULL THEN true ELSE ttft_ms <= ttft_limit_ms END AS ttft_met,
    CASE WHEN tpot_limit_ms IS NULL OR one_token THEN true ELSE tpot_ms <= tpot_limit_ms END
      AS tpot_met,
    CASE WHEN itl_limit_ms IS NULL OR one_token THEN true ELSE itl_ms <= itl_limit_ms END AS itl_met,
    CASE WHEN e2e_limit_ms IS NULL THEN true ELSE e2e_ms <= e2e_limit_ms END AS e2e_met
  FROM ended
)
SELECT
  deployment, request, position, class, undecided, ended, single, ttft_ms, tpot_ms, itl_ms, e2e_ms,
  ttft_limit_ms, tpot_limit_ms, itl_limit_ms, e2e_limit_ms, ttft_met, tpot_met, itl_met, e2e_met,
  ttft_met AND tpot_met AND itl_met AND e2e_met AS all_met,
  CASE WHEN position IS NULL THEN NULL
    WHEN ended IN ('failed', 'client_abort') THEN false
    WHEN ended = 'unknown' AND (ttft_met AND tpot_met AND itl_met AND e2e_met) IS NOT FALSE THEN NULL
    WHEN ended = 'unknown' THEN false
    ELSE ttft_met AND tpot_met AND itl_met AND e2e_met END AS good
FROM judged
