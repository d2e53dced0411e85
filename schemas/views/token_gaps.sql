-- token_gaps: the time between two emissions of a token stream.
--
-- grain:   one row per gap of a stream as one observer saw it
-- needs:   streams, legs
-- columns:
--   deployment       VARCHAR          deployment
--   request          VARCHAR          the request; NULL when the leg joined none
--   leg              VARCHAR          the leg
--   worker           VARCHAR          worker that the leg ran on
--   observer         VARCHAR          who saw the stream
--   stream           BIGINT           index of the stream when n > 1
--   emission         VARCHAR          token or chunk: what one emission is
--   position         BIGINT           1 for the gap after the first emission
--   gap_ms           DOUBLE   ms      length of the gap
--   emitted_tokens   BIGINT   tokens  tokens of the emission that ends the gap; NULL unknown
--   end_ns           BIGINT   ns      end of the gap; NULL when the stream has no instant
WITH gaps AS (
  SELECT
    leg, stream, emission, observer, first_ns, emission_tokens,
    unnest(gaps_us) AS gap_us,
    generate_subscripts(gaps_us, 1) AS position
  FROM streams
)
SELECT
  l.deployment,
  l.request,
  g.leg,
  l.worker,
  coalesce(g.observer, l.observer) AS observer,
  g.stream,
  g.emission,
  g.position,
  g.gap_us / 1e3 AS gap_ms,
  CAST(g.emission_tokens[g.position + 1] AS BIGINT) AS emitted_tokens,
  CAST(
    g.first_ns + 1000 * sum(g.gap_us) OVER (PARTITION BY g.leg, g.stream ORDER BY g.position)
    AS BIGINT
  ) AS end_ns
FROM gaps g
LEFT JOIN legs l ON l.leg = g.leg
