-- side_sums: what each worker that got requests of a side had to do for them in all.
--
-- grain:   one row per (deployment, side, worker) with requests
-- needs:   side_requests
-- when:    (SELECT min(worker) <> max(worker) FROM (SELECT worker FROM workers
--          UNION ALL SELECT prefill_worker FROM requests UNION ALL SELECT decode_worker FROM requests))
-- columns:
--   deployment       VARCHAR     deployment
--   side             VARCHAR     prefill or decode
--   worker           VARCHAR     the worker
--   split            BOOLEAN     of some of them another worker did the other half
--   requests         BIGINT      requests
--   tokens           DOUBLE      what it had to compute (side_requests), summed over those where it is known
--   token_squares    DOUBLE      sum of their squares
--   tokens_unknown   BIGINT      requests where it is not known
--   seconds          DOUBLE      what requests spent there
--   second_squares   DOUBLE      sum of their squares
--   seconds_unknown  BIGINT      requests where it is not known
SELECT deployment, side, worker, bool_or(split) AS split, count(*) AS requests,
  sum(tokens) AS tokens, sum(tokens * tokens) AS token_squares,
  count(*) - count(tokens) AS tokens_unknown, sum(seconds) AS seconds,
  sum(seconds * seconds) AS second_squares, count(*) - count(seconds) AS seconds_unknown
FROM side_requests
GROUP BY deployment, side, worker
