-- hot_prefixes: the beginnings that prompts share, and the workers that computed prompts with them.
--
-- From hashes of prompt blocks. A beginning reaches from the first token on; own is the part of it
-- after the next shorter beginning that still more requests share, so that nothing is shared twice.
-- Shared is own times the requests but one: what an endless cache of all workers could have given.
-- The hundred with the most of it. The text is not known: the name is a hash.
--
-- grain:   one row per (deployment, prefix)
-- needs:   prefix_segments
-- columns:
--   deployment       VARCHAR    deployment
--   prefix           VARCHAR    name of the beginning, a hash
--   place            BIGINT     1 for the one with most to share
--   prefix_tokens    BIGINT     tokens  its length from the first token on; NULL where the size of a block is unknown
--   own_tokens       BIGINT     tokens  of it not in a shorter shared beginning; NULL likewise
--   requests         BIGINT     requests that begin with it
--   shared_tokens    BIGINT     tokens  own times the requests but the first; NULL likewise
--   workers          VARCHAR[]  workers that computed them, most requests first (16 at most)
--   worker_requests  BIGINT[]   requests of each
--   first_ratio      DOUBLE     1       share of its requests that the first of them got; NULL where no worker is known
SELECT deployment, prefix,
  row_number() OVER (
    PARTITION BY deployment ORDER BY (until_step - from_step) * (requests - 1) DESC, prefix
  ) AS place,
  until_step * step_tokens AS prefix_tokens, (until_step - from_step) * step_tokens AS own_tokens,
  requests, (until_step - from_step) * step_tokens * (requests - 1) AS shared_tokens, workers,
  worker_requests, worker_requests[1] / nullif(list_sum(worker_requests), 0) AS first_ratio
FROM prefix_segments
