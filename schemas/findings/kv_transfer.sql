-- kv_transfer: how long requests waited for KV: transfer between workers, wait for it, load from a
-- cache tier; what was moved, how fast, and which token it held up.
--
-- Exposed time only: what is hidden behind computation is no wait (hidden_s). Where an engine cannot
-- tell the transfer from other waits on the decode side, the whole wait is an upper bound: then
-- interval_low is what is known to be KV time, interval_high (= value) includes the bound, and
-- `bound` says that more than half of value is such a bound. So is a movement inside a prefill that
-- is known as wall time only (wall_s): the prompt may have been computed meanwhile. Counters of the movements narrow it:
-- no more than counter_s of the wait can be the transfer itself, provided that they tell of as many
-- movements as requests waited (at_most_transfer_s). A prefill that is an upper bound on a prefill
-- worker (first batch to the transfer's end) may hold the transfer: prefill_bound_s is no part of value, but
-- of interval_high. Where P makes the first token the wait lies in
-- the first gap, not in TTFT: after_first_s, first_gap_ratio. Where prefill and decode are split,
-- the row is always there: that KV costs little is an answer, too.
--
-- grain:   one row per deployment
-- needs:   waits, deployment_sources, transfer_summary, transfer_links, transfer_times, transfer_waits, phase_by_request, counted_requests, requests, streams, legs, steps, workers
-- when:    EXISTS (FROM phase_sums WHERE phase IN ('kv_transfer', 'kv_wait', 'kv_load'))
-- params:
--   min_ttft_ratio  0.05  a twentieth of the TTFT, below the scatter of most runs
--   min_e2e_ratio   0.05  likewise of the whole durations, where first tokens are unknown
--   min_wait_ms     50    where nine of ten requests wait less, nobody feels it: never a warning
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning from a quarter of the TTFT and min_wait_ms on, info below
--   cost_s              DOUBLE     s  value: seconds that the requests spent there
--   level               VARCHAR    B: phases are positioned
--   value               DOUBLE     seconds that the requests spent there, summed
--   unit                VARCHAR    s
--   interval_low        DOUBLE     value without its upper-bound part
--   interval_high       DOUBLE     value, with prefill_bound_s
--   share               DOUBLE     over TTFT: sum of the part before first tokens over the sum of TTFT; NULL where no first token is known
--   requests            BIGINT     requests that spent time there
--   workers             VARCHAR[]  workers of at least a tenth of the seconds, the greatest first
--   culprits            STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests that spent most there; value: seconds
--   sources             VARCHAR[]  files that the requests come from
--   seen                BIGINT     requests with a window
--   share_of_e2e_ratio  DOUBLE     1  value over the whole durations
--   wait_p50_ms         DOUBLE     ms  per request, median (0 counted)
--   wait_p90_ms         DOUBLE     ms  90th percentile
--   wait_p99_ms         DOUBLE     ms  99th percentile
--   bound               BOOLEAN    value is mainly an upper bound
--   transfer_s          DOUBLE     s  part in a transfer that somebody states and that no prefill can have hidden
--   wait_s              DOUBLE     s  part waiting for the transfer to begin or for KV space
--   upper_bound_s       DOUBLE     s  part that is an upper bound
--   prefill_bound_s     DOUBLE     s  prefill of split requests that may hold their transfer; 0: none does
--   wall_s              DOUBLE     s  of it movements inside a prefill known as wall time only: hidden behind it, or waited for
--   load_s              DOUBLE     s  part loading a prefix from another cache tier that no prefill can have hidden
--   transfers           BIGINT     KV movements that records tell one by one; NULL when none do
--   transferred_bytes   BIGINT     bytes  what they moved; NULL unknown
--   failed_transfers    BIGINT     movements that failed or expired; NULL where the outcome of any is not stated
--   directions          VARCHAR[]  directions of the movements: prefill_to_decode, decode_to_prefill, load or store
--   bytes_basis         VARCHAR    measured, config, formula or mixed: where those bytes come from
--   bridge_s            DOUBLE     s  part of wait_s between prefill and the transfer's start
--   space_s             DOUBLE     s  part of wait_s that is known to be a wait for KV space on the decode worker
--   link_busy_s         DOUBLE     s  part of bridge_s and space_s while the link was moving other KV (table transfer_waits); NULL without movements' instants
--   moved_s             DOUBLE     s  time that movements were under way, overlaps within a request once; NULL without instants
--   hidden_s            DOUBLE     s  of it inside the requests' own prefill steps: nobody waited; NULL unknown
--   counter_transfers   BIGINT     movements that counters or log lines tell of (each rank's own counts)
--   counter_s           DOUBLE     s  sum of their durations
--   counter_bytes       BIGINT     bytes  their bytes
--   counter_since_start  BOOLEAN   they run from the start of a process: movements before these data may be among them
--   at_most_transfer_s  DOUBLE     s  no more of value can be the transfer itself, by the counters; NULL where they do not bound it
--   expected_bytes      BIGINT     bytes  KV of all prompts, as if nothing was cached on the decode side; NULL unknown
--   expected_basis      VARCHAR    config or formula
--   size_note           VARCHAR    what the size of a token's KV rests on, or why it is unknown
--   decode_usage_max_ratio  DOUBLE  1  fullest KV cache in any step of the decode workers; NULL unless all steps are there and say it
--   origin              VARCHAR    who made the first delivered tokens: prefill, decode or mixed; NULL unknown
--   after_first_s       DOUBLE     s  part of value behind the first delivered token, requests whose first token P made
--   first_gap_ratio     DOUBLE     1  after_first_s over those requests' first gaps; NULL where the gaps are unknown
--   links               BIGINT     links with movements
--   link_from           VARCHAR    the link with most bytes (else most movements): where from
--   link_to             VARCHAR    where to
--   link_rate           DOUBLE     what it gave while busy, bytes a second
--   link_setup_ms       DOUBLE     ms  fitted time of a movement of no bytes
--   link_setup_low_ms   DOUBLE     ms  95 % interval, lower end
--   link_setup_high_ms  DOUBLE     ms  upper end
--   link_speed          DOUBLE     fitted bandwidth of large movements, bytes a second
--   link_speed_low      DOUBLE     95 % interval, lower end
--   link_speed_high     DOUBLE     upper end
--   link_contention_ratio       DOUBLE  1  part of its own time that each other movement in flight adds
--   link_contention_low_ratio   DOUBLE  1  95 % interval, lower end
--   link_contention_high_ratio  DOUBLE  1  upper end
--   link_note           VARCHAR    what limits the fit
WITH late_request AS (
  -- KV time behind the first token, where P made it
  SELECT p.deployment, p.request, sum(p.duration_ms - p.ttft_part_ms) AS after_first_ms
  FROM phase_by_request AS p
  JOIN requests AS r ON r.request = p.request
  WHERE p.counted AND p.phase IN ('kv_transfer', 'kv_wait') AND r.first_token_origin = 'prefill'
  GROUP BY p.deployment, p.request
),
first_gap AS (
  SELECT l.request, min(s.gaps_us[1]) / 1e3 AS gap_ms
  FROM streams AS s
  JOIN legs AS l ON l.leg = s.leg
  JOIN requests AS r ON r.request = l.request
  SEMI JOIN late_request AS e ON e.request = l.request
  WHERE l.observer = r.first_token_observer
  GROUP BY l.request
),
late AS (
  SELECT e.deployment, sum(after_first_ms) / 1e3 AS after_first_s,
    sum(after_first_ms) FILTER (gap_ms > 0) / sum(gap_ms) FILTER (gap_ms > 0) AS first_gap_ratio
  FROM late_request AS e
  LEFT JOIN first_gap AS g ON g.request = e.request
  GROUP BY e.deployment
),
decode_cache AS (
  SELECT w.deployment, max(s.kv_usage_ratio) AS decode_usage_max_ratio
  FROM steps AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE w.role = 'decode'
  GROUP BY w.deployment
  HAVING bool_and(s.capture = 'full') AND count(s.kv_usage_ratio) = count(*)
),
ended AS (
  SELECT deployment,
    CASE WHEN count(outcome) = count(*)
      THEN count(*) FILTER (outcome IN ('failed', 'expired')) END AS failed_transfers,
    list(DISTINCT direction ORDER BY direction) FILTER (direction IS NOT NULL) AS directions
  FROM transfer_times
  GROUP BY deployment
),
holding AS (
  SELECT p.deployment, CAST(sum(CAST(round(p.bound_ms * 1e6) AS BIGINT)) AS DOUBLE) / 1e9 AS prefill_bound_s
  FROM phase_by_request AS p
  JOIN requests AS r ON r.request = p.request
  WHERE p.counted AND p.phase = 'prefill' AND p.bound_ms > 0 AND r.mode = 'disaggregated'
  GROUP BY p.deployment
),
behind AS (
  SELECT w.deployment, sum(busy_ms) / 1e3 AS link_busy_s
  FROM transfer_waits AS w
  SEMI JOIN counted_requests AS c ON c.request = w.request
  GROUP BY w.deployment
),
busiest_link AS (
  SELECT *, count(*) OVER (PARTITION BY deployment) AS links
  FROM transfer_links
  QUALIFY row_number() OVER (
    PARTITION BY deployment
    ORDER BY bytes DESC NULLS LAST, transfers DESC, source_worker, destination_worker, backend
  ) = 1
)
SELECT d.deployment,
  CASE WHEN coalesce(ttft_ratio, e2e_ratio) >= 0.25 AND wait_p90_ms >= min_wait_ms
    THEN 'warning' ELSE 'info' END AS severity,
  d.wait_s AS cost_s, 'B' AS level, d.wait_s AS value, 's' AS unit,
  d.wait_s - bound_s AS interval_low,
  d.wait_s + coalesce(h.prefill_bound_s, 0) AS interval_high,
  ttft_ratio AS share, d.requests, d.workers, d.culprits,
  coalesce(s.paths, []) AS sources,
  seen, e2e_ratio AS share_of_e2e_ratio, wait_p50_ms, wait_p90_ms, wait_p99_ms,
  bound_s > 0.5 * d.wait_s AS bound,
  coalesce(detail_s['kv_transfer'] - bound_detail_s['kv_transfer'], 0) AS transfer_s,
  coalesce(detail_s['bridge_wait'] - bound_detail_s['bridge_wait'], 0)
    + coalesce(detail_s['kv_space_wait'] - bound_detail_s['kv_space_wait'], 0)
    + coalesce(detail_s['kv_wait_upper_bound'] - bound_detail_s['kv_wait_upper_bound'], 0) AS wait_s,
  bound_s AS upper_bound_s, coalesce(h.prefill_bound_s, 0) AS prefill_bound_s,
  coalesce(bound_detail_s['kv_transfer'], 0) + coalesce(bound_detail_s['kv_load'], 0) AS wall_s,
  coalesce(detail_s['kv_load'] - bound_detail_s['kv_load'], 0) AS load_s,
  m.movements AS transfers, m.bytes AS transferred_bytes,
  o.failed_transfers, coalesce(o.directions, []) AS directions, m.bytes_basis,
  coalesce(detail_s['bridge_wait'] - bound_detail_s['bridge_wait'], 0) AS bridge_s,
  coalesce(detail_s['kv_space_wait'] - bound_detail_s['kv_space_wait'], 0) AS space_s,
  n.link_busy_s, m.moved_s, m.hidden_s, m.counter_transfers, m.counter_s, m.counter_bytes,
  m.counter_since_start,
  CASE WHEN m.counter_transfers >= d.requests AND m.counter_s < d.wait_s THEN m.counter_s END
    AS at_most_transfer_s,
  m.expected_bytes, m.expected_basis, m.size_note,
  u.decode_usage_max_ratio, m.origin,
  coalesce(e.after_first_s, 0) AS after_first_s, e.first_gap_ratio,
  coalesce(b.links, 0) AS links, b.source_worker AS link_from, b.destination_worker AS link_to,
  b.link_bytes_per_second AS link_rate, b.setup_ms AS link_setup_ms,
  b.setup_low_ms AS link_setup_low_ms, b.setup_high_ms AS link_setup_high_ms,
  b.bytes_per_second AS link_speed, b.bytes_per_second_low AS link_speed_low,
  b.bytes_per_second_high AS link_speed_high, b.contention_ratio AS link_contention_ratio,
  b.contention_low_ratio AS link_contention_low_ratio,
  b.contention_high_ratio AS link_contention_high_ratio, b.note AS link_note
FROM waits(
  details := ['kv_load', 'kv_transfer', 'bridge_wait', 'kv_space_wait', 'kv_wait_upper_bound'],
  on_decode := true
) AS d
LEFT JOIN transfer_summary AS m ON m.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN late AS e ON e.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN decode_cache AS u ON u.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN ended AS o ON o.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN holding AS h ON h.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN behind AS n ON n.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN busiest_link AS b ON b.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE d.wait_s > 0
  AND (split OR coalesce(ttft_ratio, 0) >= min_ttft_ratio
    OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
