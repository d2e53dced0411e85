-- stutter: token times of the requests that were held up, over the prefills that held them up, on one worker.
--
-- One stretch of time on one worker: of the worker whose streams lost most to prefills of others
-- (evidence level B: token times and prefill intervals; table interference_events) the stretch in which
-- most was lost. The requests that lost most are shown, and those whose prompts took most; where tokens
-- are many, only every n-th (kept_one_in).
--
-- grain:   one row per mark: a prefill, a token, or a stall
-- needs:   interference_events, interference_gaps, streams, legs, requests, phases, worker_labels
-- params:
--   on_worker  NULL    the worker to show; NULL: the one that lost most
--   from_ns    NULL    start of the stretch; NULL: where most was lost
--   seconds    NULL    its length without a third of it before and after; NULL: ten times what nine in ten stalls last, 0.5 to 30
--   lines      12      requests that are shown, at most
--   marks      3000    tokens that are shown, at most
-- columns:
--   deployment     VARCHAR       deployment
--   worker         VARCHAR       the worker
--   worker_name    VARCHAR       its short name, unique in the deployment
--   kind           VARCHAR       prefill, token or stall
--   request        VARCHAR       request whose prompt was computed, or whose token it is, or that was held up
--   role           VARCHAR       culprit or victim: what the request is in this stretch (culprit where it is both)
--   place          BIGINT        its place: culprits first, each by seconds taken or lost
--   start_ns       BIGINT   ns   start; of a token its instant
--   end_ns         BIGINT   ns   end; of a token its instant
--   duration_ms    DOUBLE   ms   length; of a token NULL
--   lost_ms        DOUBLE   ms   of a stall what prefills explain; of a culprit's prefill what it took in this stretch
--   culprit        VARCHAR       of a stall the request whose prefill shares most time with it
--   prompt_tokens  BIGINT   tokens  of a prefill the tokens of the prompt
--   stretch_start_ns  BIGINT  ns  start of the stretch
--   stretch_end_ns  BIGINT  ns  its end
--   baseline_ms    DOUBLE   ms   ordinary gap between tokens on this worker
--   victims        BIGINT        requests held up in this stretch, shown or not
--   stretch_lost_s  DOUBLE  s    decode seconds lost in this stretch
--   kept_one_in    BIGINT        every n-th token is shown
--   level          VARCHAR       evidence level
WITH chosen_worker AS (
  SELECT g.worker, g.deployment, w.label AS name, g.baseline_ms, coalesce(g.offset_ms, 0) AS offset_ms
  FROM interference_gaps AS g
  LEFT JOIN worker_labels AS w ON w.worker = g.worker
  WHERE g.flagged AND (on_worker IS NULL OR g.worker = on_worker)
  QUALIFY row_number() OVER (PARTITION BY g.deployment ORDER BY g.lost_s DESC, g.worker) = 1
),
stall AS (
  SELECT c.deployment, e.worker, e.victim, e.stream, e.culprit, e.lost_ms, e.gap_ms, e.end_ns,
    e.end_ns - CAST(e.gap_ms * 1e6 AS BIGINT) AS start_ns
  FROM interference_events AS e
  JOIN chosen_worker AS c ON c.worker = e.worker
  WHERE e.end_ns IS NOT NULL AND e.lost_ms > 0
),
length AS (
  SELECT worker, CAST(1e9 * coalesce(
    seconds, least(30, greatest(0.5, 10 * quantile_cont(gap_ms, 0.9) / 1e3))
  ) AS BIGINT) AS length_ns
  FROM stall
  GROUP BY worker
),
-- The stretch that begins with a stall and holds most of what was lost.
ahead AS (
  SELECT s.worker, s.start_ns, l.length_ns,
    sum(s.lost_ms) OVER (
      PARTITION BY s.worker ORDER BY s.start_ns RANGE BETWEEN CURRENT ROW AND l.length_ns FOLLOWING
    ) AS lost_ms
  FROM stall AS s
  JOIN length AS l ON l.worker = s.worker
),
stretch AS (
  SELECT worker, coalesce(from_ns, start_ns - length_ns // 3) AS from_ns,
    coalesce(from_ns, start_ns - length_ns // 3) + length_ns + 2 * (length_ns // 3) AS to_ns
  FROM ahead
  QUALIFY row_number() OVER (PARTITION BY worker ORDER BY lost_ms DESC, start_ns) = 1
),
inside AS (
  SELECT s.*, t.from_ns, t.to_ns
  FROM stall AS s
  JOIN stretch AS t ON t.worker = s.worker
  WHERE s.end_ns > t.from_ns AND s.start_ns < t.to_ns
),
total AS (
  SELECT worker, sum(lost_ms) / 1e3 AS lost_s, count(DISTINCT victim) AS victims
  FROM inside
  GROUP BY worker
),
taker AS (
  SELECT worker, culprit AS request, sum(lost_ms) AS lost_ms,
    row_number() OVER (PARTITION BY worker ORDER BY sum(lost_ms) DESC, culprit) AS place
  FROM inside
  WHERE culprit IS NOT NULL
  GROUP BY worker, culprit
  QUALIFY place <= greatest(lines // 2, 1)
),
loser AS (
  SELECT worker, victim AS request, sum(lost_ms) AS lost_ms,
    row_number() OVER (PARTITION BY worker ORDER BY sum(lost_ms) DESC, victim) AS place
  FROM inside
  GROUP BY worker, victim
  QUALIFY place <= lines
),
line AS (
  SELECT worker, request, 'culprit' AS role, place, lost_ms
  FROM taker
  UNION ALL
  SELECT worker, request, 'victim', 1000 + place, lost_ms
  FROM loser
  WHERE (worker, request) NOT IN (SELECT (worker, request) FROM taker)
),
-- Of each stream what the observer nearest to the engine saw.
seen AS (
  SELECT n.worker, n.request, coalesce(s.stream, 0) AS stream, s.first_ns, s.gaps_us
  FROM line AS n
  JOIN legs AS l ON l.request = n.request
  JOIN streams AS s ON s.leg = l.leg
  WHERE s.first_ns IS NOT NULL
  QUALIFY row_number() OVER (
    PARTITION BY n.worker, n.request, coalesce(s.stream, 0)
    ORDER BY list_position(
      ['engine', 'frontend', 'router', 'gateway', 'client'], coalesce(s.observer, l.observer)
    ), len(s.gaps_us) DESC, s.first_ns, s.leg
  ) = 1
),
gap AS (
  SELECT worker, request, stream, first_ns, generate_subscripts(gaps_us, 1) AS position,
    unnest(gaps_us) AS gap_us
  FROM seen
),
emitted AS (
  SELECT worker, request, first_ns AS time_ns
  FROM seen
  UNION ALL
  SELECT worker, request, first_ns + 1000 * CAST(sum(gap_us) OVER (
    PARTITION BY worker, request, stream ORDER BY position
  ) AS BIGINT)
  FROM gap
),
token AS (
  SELECT e.*, row_number() OVER (PARTITION BY e.worker, e.request ORDER BY e.time_ns) AS number,
    greatest(1, CAST(ceil(count(*) OVER (PARTITION BY e.worker) / marks) AS BIGINT)) AS one_in
  FROM emitted AS e
  JOIN stretch AS t ON t.worker = e.worker
  WHERE e.time_ns BETWEEN t.from_ns AND t.to_ns
),
prefill AS (
  SELECT n.worker, n.request, CASE WHEN n.role = 'culprit' THEN n.lost_ms END AS lost_ms,
    p.start_ns + CAST(1e6 * c.offset_ms AS BIGINT) AS start_ns,
    p.end_ns + CAST(1e6 * c.offset_ms AS BIGINT) AS end_ns
  FROM phases AS p
  JOIN line AS n ON n.request = p.request AND n.worker = p.worker
  JOIN chosen_worker AS c ON c.worker = n.worker
  JOIN stretch AS t ON t.worker = n.worker
  WHERE p.phase = 'prefill' AND p.end_ns + CAST(1e6 * c.offset_ms AS BIGINT) > t.from_ns
    AND p.start_ns + CAST(1e6 * c.offset_ms AS BIGINT) < t.to_ns
),
mark AS (
  SELECT 'prefill' AS kind, p.worker, p.request, p.start_ns, p.end_ns,
    (p.end_ns - p.start_ns) / 1e6 AS duration_ms, p.lost_ms, NULL AS culprit, NULL AS one_in
  FROM prefill AS p
  UNION ALL
  SELECT 'stall', worker, victim, start_ns, end_ns, gap_ms, lost_ms, culprit, NULL
  FROM inside
  UNION ALL
  SELECT 'token', worker, request, time_ns, time_ns, NULL, NULL, NULL, one_in
  FROM token
  WHERE number % one_in = 0
)
SELECT c.deployment, c.worker, c.name AS worker_name, m.kind, m.request, n.role,
  CAST(dense_rank() OVER (PARTITION BY c.worker ORDER BY n.place) AS BIGINT) AS place,
  m.start_ns, m.end_ns, m.duration_ms, m.lost_ms, m.culprit,
  CASE WHEN m.kind = 'prefill' THEN r.prompt_tokens END AS prompt_tokens,
  h.from_ns AS stretch_start_ns, h.to_ns AS stretch_end_ns, c.baseline_ms, t.victims, t.lost_s AS stretch_lost_s,
  CAST(max(m.one_in) OVER (PARTITION BY c.worker) AS BIGINT) AS kept_one_in,
  'B' AS level
FROM mark AS m
JOIN line AS n ON n.worker = m.worker AND n.request = m.request
JOIN chosen_worker AS c ON c.worker = m.worker
JOIN total AS t ON t.worker = m.worker
JOIN stretch AS h ON h.worker = m.worker
LEFT JOIN requests AS r ON r.request = m.request
