-- The tables of a pdtrace file. The comment behind a column becomes its COMMENT ON; the lines above
-- a table say its row (COMMENT ON TABLE), its natural key (`key:`) and the stage that fills it (`stage:`).
-- Instants are BIGINT nanoseconds since the epoch (`_ns`), durations DOUBLE milliseconds (`_ms`),
-- sizes bytes, counts plain. Unknown is NULL, never 0. `source` and `record` say which record of which
-- file made a row (NULL where a later stage made it).

-- one row per file, archive member or stream that was looked at
-- stage: read
-- key: source
CREATE TABLE sources (
  source INTEGER,            -- number of the source: its rank by path among all that were given
  path VARCHAR,              -- path as given; members of archives as archive!member
  collector VARCHAR,         -- collectors that read it, joined by '+'; NULL when none did
  used BOOLEAN,              -- true when at least one of its records gave a table row
  why VARCHAR,               -- what the source is, or why it was not used
  bytes BIGINT,              -- size after decompression; NULL when not read to the end
  record_unit VARCHAR,       -- what one record is (span, line, request, ...)
  rows_read BIGINT,          -- records seen
  rows_kept BIGINT,          -- distinct records that gave at least one table row
  rows_skipped BIGINT,       -- all other records, duplicates among them; read = kept + skipped
  start_ns BIGINT,           -- earliest instant in it
  end_ns BIGINT,             -- latest instant in it
  clock VARCHAR,             -- clock of its instants: wall, or the name of a domain without epoch
  sha256 VARCHAR             -- of the decompressed content; NULL when not read to the end
);

-- records that were not kept, counted per source and reason; never one row per line, never prompt text
-- stage: read
-- key: source, reason
CREATE TABLE skipped (
  source INTEGER,            -- the source
  reason VARCHAR,            -- why the records were not kept
  records BIGINT,            -- how many
  positions BIGINT[],        -- ordinals of the first five
  excerpt VARCHAR            -- one masked excerpt (letters and digits of unknown words replaced)
);

-- OpenTelemetry resources, each distinct content once
-- stage: read
-- key: resource
CREATE TABLE resources (
  resource VARCHAR,          -- hash of the content
  service_name VARCHAR,      -- service.name
  attributes MAP(VARCHAR, VARCHAR),  -- all attributes as text (typed values as JSON)
  content VARCHAR            -- the same with types kept, and schema URL and unknown fields, as one JSON object
);

-- OpenTelemetry spans, lossless except content (prompt and answer text becomes length and sha256)
-- stage: read
-- key: trace_id, span_id, start_ns
CREATE TABLE spans (
  source INTEGER,            -- source of the copy that was kept
  record BIGINT,             -- ordinal of the record in that source
  trace_id VARCHAR,          -- hexadecimal, lower case
  span_id VARCHAR,           -- hexadecimal, lower case
  parent_span_id VARCHAR,    -- hexadecimal; NULL for a root
  start_ns BIGINT,           -- start
  end_ns BIGINT,             -- end; NULL for a span that never ended
  name VARCHAR,              -- span name
  kind VARCHAR,              -- unspecified, internal, server, client, producer or consumer
  status_code VARCHAR,       -- unset, ok or error
  status_message VARCHAR,    -- message of the status
  trace_state VARCHAR,       -- W3C tracestate
  flags BIGINT,              -- W3C trace flags
  scope_name VARCHAR,        -- instrumentation scope
  scope_version VARCHAR,     -- its version
  resource VARCHAR,          -- the resource (table resources)
  string_keys VARCHAR,       -- keys of the string attributes, joined by chr(31)
  string_values VARCHAR[],   -- their values, in the same order
  int_keys VARCHAR,          -- keys of the integer attributes
  int_values BIGINT[],       -- their values
  double_keys VARCHAR,       -- keys of the floating point attributes
  double_values DOUBLE[],    -- their values
  bool_keys VARCHAR,         -- keys of the boolean attributes
  bool_values BOOLEAN[],     -- their values
  other_keys VARCHAR,        -- keys of arrays, maps, bytes and empty values
  other_values VARCHAR[],    -- their values as JSON text
  events STRUCT(time_ns BIGINT, name VARCHAR, attributes VARCHAR)[],       -- span events; attributes as JSON text
  links STRUCT(trace_id VARCHAR, span_id VARCHAR, attributes VARCHAR)[],   -- span links; attributes as JSON text
  extra VARCHAR,             -- fields of the record that this table has no column for, as JSON text
  resolution_ns BIGINT       -- resolution of the instants; 1 for OTLP, more for spans rebuilt from log lines
);

-- time series from metrics dumps and periodic log lines; a histogram is its _bucket (label le), _sum and _count series
-- stage: read
CREATE TABLE samples (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  worker VARCHAR,            -- worker that the sample describes
  time_ns BIGINT,            -- instant of the sample; NULL when the dump does not say
  metric VARCHAR,            -- metric name as emitted
  labels VARCHAR,            -- labels as a JSON object, keys sorted
  value DOUBLE,              -- value
  interval_ns BIGINT,        -- the value is a mean or sum over this much time before time_ns; NULL for instants and totals
  kind VARCHAR,              -- gauge, counter or histogram
  resolution_ns BIGINT       -- resolution of time_ns
);

-- things that happened at an instant: preemption, abort, failure, restart, out of memory, KV alarm, HTTP error, start-up
-- stage: read
CREATE TABLE events (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  worker VARCHAR,            -- worker it happened on
  time_ns BIGINT,            -- when; NULL when unknown
  resolution_ns BIGINT,      -- resolution of time_ns
  kind VARCHAR,              -- preemption, abort, failure, restart, oom, kv_expired, kv_invalid, kv_failure, http_error, stall, started, warning, tool
  severity VARCHAR,          -- critical, warning or info
  request_id VARCHAR,        -- the request it names, in the emitter's own spelling
  count BIGINT,              -- how many happened, where one record tells of several
  detail VARCHAR             -- short text; never prompt or answer text
);

-- engine iterations
-- stage: read
-- key: worker, rank, seq, start_ns
CREATE TABLE steps (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  worker VARCHAR,            -- worker that ran the step
  rank VARCHAR,              -- engine index or data parallel rank inside the worker
  seq BIGINT,                -- iteration number as the engine counts it
  elapsed_ns BIGINT,         -- duration as reported
  start_ns BIGINT,           -- start; NULL where only a coarse log time is known
  start_lower_ns BIGINT,     -- earliest possible start
  start_upper_ns BIGINT,     -- latest possible start
  prefill_requests BIGINT,   -- requests whose prompt tokens were computed
  prefill_tokens BIGINT,     -- prompt tokens computed
  prefill_kv_tokens BIGINT,  -- context already in the cache of those requests
  decode_requests BIGINT,    -- requests that decoded
  decode_tokens BIGINT,      -- tokens decoded
  decode_kv_tokens BIGINT,   -- context of the decoding requests
  running BIGINT,            -- requests resident on the engine
  waiting BIGINT,            -- requests waiting
  queued_prefill_tokens BIGINT, -- prompt tokens waiting
  kv_usage_ratio DOUBLE,     -- share of the KV cache in use, 0 to 1
  pulled_requests BIGINT,    -- prefill_requests that only took over pulled KV (first step on a KV consumer); no prefill
  capture VARCHAR            -- full (every step is here) or sampled
);

-- who was in a step, where the source says so
-- stage: read
CREATE TABLE step_members (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  worker VARCHAR,            -- worker that ran the step
  rank VARCHAR,              -- rank inside the worker
  seq BIGINT,                -- iteration number
  request_id VARCHAR,        -- request in the emitter's own spelling
  prefill_tokens BIGINT,     -- prompt tokens of it computed in this step
  decode_tokens BIGINT,      -- tokens of it decoded in this step
  context_tokens BIGINT      -- its context before the step
);

-- KV movements between workers or cache tiers
-- stage: read
CREATE TABLE transfers (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  leg VARCHAR,               -- leg that it belongs to, when known
  request_id VARCHAR,        -- request in the emitter's own spelling
  source_worker VARCHAR,     -- where the KV came from
  destination_worker VARCHAR, -- where it went
  start_ns BIGINT,           -- start
  end_ns BIGINT,             -- end
  duration_ms DOUBLE,        -- duration where instants are unknown
  bytes BIGINT,              -- bytes moved
  backend VARCHAR,           -- name of the mover, as it calls itself
  direction VARCHAR,         -- prefill_to_decode, decode_to_prefill, load or store
  outcome VARCHAR            -- completed, failed or expired
);

-- router choices
-- stage: interpret
CREATE TABLE decisions (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  leg VARCHAR,               -- leg of the router that decided
  trace_id VARCHAR,          -- trace
  request_id VARCHAR,        -- request in the router's spelling
  router VARCHAR,            -- worker that decided
  time_ns BIGINT,            -- when
  duration_ms DOUBLE,        -- how long the choice took
  phase VARCHAR,             -- prefill, decode, aggregated or NULL
  policy VARCHAR,            -- policy by name
  worker VARCHAR,            -- the worker chosen
  cost DOUBLE,               -- cost (logit) of the chosen one
  overlap_tokens BIGINT,     -- prompt tokens that the router believed cached there
  load DOUBLE,               -- load of the chosen one as the router saw it
  candidates BIGINT          -- how many workers could be chosen
);

-- worker instances (router, frontend, engine, client); `workers.worker` is the id that every other table uses
-- stage: interpret
-- key: worker
CREATE TABLE workers (
  worker VARCHAR,            -- id: kind:value of its strongest alias
  deployment VARCHAR,        -- deployment it belongs to
  name VARCHAR,              -- short name for people
  role VARCHAR,              -- client, gateway, router, frontend, prefill, decode, aggregated; NULL unknown
  role_basis VARCHAR,        -- span, log, config or inferred
  engine VARCHAR,            -- software that it runs
  version VARCHAR,           -- its version
  host VARCHAR,              -- host name
  rank VARCHAR,              -- data parallel or tensor rank
  start_ns BIGINT,           -- first instant seen of it
  end_ns BIGINT              -- last instant seen of it
);

-- names under which a worker appears
-- stage: read
CREATE TABLE worker_aliases (
  source INTEGER,            -- source that said so; NULL when a later stage did
  worker VARCHAR,            -- the worker
  kind VARCHAR,              -- instance, engine_id, worker_id, pod, pid, service, address, file or process
  value VARCHAR              -- the alias
);

-- what was said of a worker or deployment: flags, connector, budget, blocks, parallelism, model, limits
-- stage: read
CREATE TABLE facts (
  source INTEGER,            -- source that said so; NULL when a later stage did
  worker VARCHAR,            -- worker it is about; NULL when about the deployment of the source
  key VARCHAR,               -- name, lower_snake; a _ in front: a note of one collector for another
  value VARCHAR              -- value as text
);

-- sets of worker instances that exchange requests in overlapping time
-- stage: derived
-- key: deployment
CREATE TABLE deployments (
  deployment VARCHAR,        -- hash of its smallest worker or source key
  name VARCHAR,              -- name for people
  name_basis VARCHAR,        -- what the name and grouping rest on: requests, aliases, folder
  mode VARCHAR,              -- aggregated, disaggregated, mixed or unknown
  start_ns BIGINT,           -- first instant
  end_ns BIGINT,             -- last instant
  headline_observer VARCHAR  -- observer whose TTFT is the headline: outermost one that saw start and first delivered token of 90 % of the completed requests
);

-- one row per (request, component that saw it)
-- stage: interpret
-- key: leg
CREATE TABLE legs (
  leg VARCHAR,               -- id
  source INTEGER,            -- source it came from
  record BIGINT,             -- ordinal of the record, where one record made it
  worker VARCHAR,            -- worker that saw the request
  deployment VARCHAR,        -- deployment, filled by the identity stage
  request VARCHAR,           -- request, filled by the identity stage
  observer VARCHAR,          -- client, gateway, router, frontend or engine
  role VARCHAR,              -- role of the worker in this leg: client, gateway, router, frontend, prefill, decode, aggregated; NULL unknown
  rank VARCHAR,              -- data parallel rank (engine index) inside the worker that served the request; NULL unknown
  role_basis VARCHAR,        -- span, log, config or inferred
  container BOOLEAN,         -- true for hops (client spans) that only carry another leg: never a request window or phase
  trace_id VARCHAR,          -- trace
  span_id VARCHAR,           -- span
  parent_span_id VARCHAR,    -- span that caused it
  trace_alone_ok BOOLEAN,    -- NULL or false: a bare trace id never joins (the default)
  request_id VARCHAR,        -- the component's own request id
  external_id VARCHAR,       -- id that travels between components (X-Request-Id based, without prefixes and suffixes of one component)
  remote_id VARCHAR,         -- request id of another component that this leg names (remote_request_id)
  bootstrap_room VARCHAR,    -- room in which P and D meet
  transfer_id VARCHAR,       -- transfer id shared by P and D
  session VARCHAR,           -- session or conversation
  turn BIGINT,               -- turn in the session
  row_index BIGINT,          -- index of the row in a bench file
  id_prefix VARCHAR,         -- request id prefix of a bench file; ids are prefix + row_index
  attempt BIGINT,            -- 0 for the first attempt, 1 for the first retry, ...
  stream BIGINT,             -- index of the stream when n > 1
  clock VARCHAR,             -- clock of its instants: wall, or a domain without epoch (perf:...)
  clock_start_ns BIGINT,     -- start in the domain's own time, where clock is not wall
  start_ns BIGINT,           -- start (arrival at this component)
  first_token_ns BIGINT,     -- first token as this component saw it
  last_token_ns BIGINT,      -- last token as this component saw it
  end_ns BIGINT,             -- end
  resolution_ns BIGINT,      -- resolution of its instants
  ttft_ms DOUBLE,            -- time to first token of this component, where reported or measured as a duration
  e2e_ms DOUBLE,             -- whole duration, likewise
  tpot_ms DOUBLE,            -- mean time per output token after the first, likewise
  ttft_definition VARCHAR,   -- what the first-token time means here
  first_token_delivered BOOLEAN, -- false when its first token is known not to reach the user (prefill leg of a P/D pair); NULL unknown
  model VARCHAR,             -- model
  prompt_tokens BIGINT,      -- prompt tokens
  cached_tokens BIGINT,      -- of them found in a cache
  output_tokens BIGINT,      -- output tokens
  max_tokens BIGINT,         -- limit asked for
  streaming BOOLEAN,         -- answer was streamed
  tenant VARCHAR,            -- user, team or customer; of an API key only a hash
  route VARCHAR,             -- HTTP route that was called, without its query
  status VARCHAR,            -- completed, failed, aborted or unknown
  finish_reason VARCHAR,     -- stop, length, ...
  error VARCHAR,             -- error kind or code
  note VARCHAR               -- remark of a table of requests
);

-- what a system said of itself, untouched
-- stage: interpret
CREATE TABLE reported (
  source INTEGER,            -- the source
  leg VARCHAR,               -- the leg
  quantity VARCHAR,          -- name as reported
  value DOUBLE,              -- value as reported
  unit VARCHAR,              -- s, ms, tokens, bytes or 1
  definition VARCHAR         -- what its code computes
);

-- time spent in one kind of work or wait: the input of the partition
-- stage: interpret
CREATE TABLE intervals (
  source INTEGER,            -- the source; NULL for spans
  leg VARCHAR,               -- the leg
  detail VARCHAR,            -- phase detail (model.PHASE_DETAILS)
  decode_detail VARCHAR,     -- detail to use instead when the leg turns out to be the decode leg of a P/D pair; NULL same
  start_ns BIGINT,           -- start; NULL when only the duration is known
  end_ns BIGINT,             -- end; NULL when only the duration is known or when it never ended
  duration_ns BIGINT,        -- duration, where the instants are unknown
  basis VARCHAR,             -- measured, reported, placed, inferred or upper_bound
  clock VARCHAR,             -- clock of the instants
  resolution_ns BIGINT,      -- resolution of the instants
  censored BOOLEAN,          -- the end was not seen
  semantics VARCHAR,         -- remark on its meaning (exec, wall, contains the KV transfer, ...)
  end_leg VARCHAR            -- leg whose worker stamped end_ns, where that is not the leg's own
);

-- one row per token stream as one observer saw it
-- stage: interpret
-- key: leg, stream
CREATE TABLE streams (
  source INTEGER,            -- the source
  leg VARCHAR,               -- the leg
  stream BIGINT,             -- index of the stream when n > 1
  first_ns BIGINT,           -- instant of the first emission; NULL when unknown
  gaps_us INTEGER[],         -- gaps between emissions, microseconds
  emission_tokens INTEGER[], -- tokens of each emission, the first included; NULL when unknown
  emission VARCHAR,          -- token or chunk
  clock VARCHAR,             -- clock of first_ns
  observer VARCHAR           -- client, gateway, router, frontend or engine
);

-- hashes of the blocks of a prompt, where a record tells them: equal beginnings are equal prefixes
-- stage: interpret
-- key: leg
CREATE TABLE prefix_blocks (
  source INTEGER,            -- the source
  record BIGINT,             -- ordinal of the record
  leg VARCHAR,               -- the leg whose prompt it is
  block_tokens BIGINT,       -- tokens of a block; NULL unknown
  hashes UBIGINT[]           -- hash of each block, from the first token on; a last block may be partial
);

-- why two legs are one request
-- stage: derived
CREATE TABLE identity_edges (
  leg_a VARCHAR,             -- one leg (the smaller id, or the parent)
  leg_b VARCHAR,             -- the other
  rule VARCHAR,              -- direct_parent, router_parent, engine_request_id, http_request_id, remote_reference, bootstrap_room, transfer_id, prefix_index, same_row, same_call
  key VARCHAR                -- the value that matched
);

-- one row per request of a user
-- stage: derived
-- key: request
CREATE TABLE requests (
  request VARCHAR,           -- id for people, unique in the file
  deployment VARCHAR,        -- deployment
  start_ns BIGINT,           -- start of the window: the outermost observer's
  end_ns BIGINT,             -- end of the window
  first_token_ns BIGINT,     -- first delivered token as the first_token_observer saw it
  window_observer VARCHAR,   -- observer whose window is partitioned
  first_token_observer VARCHAR, -- observer of first_token_ns
  resolution_ns BIGINT,      -- resolution of the window's instants
  ttft_ms DOUBLE,            -- headline time to first token (deployments.headline_observer); NULL when that observer did not see it
  e2e_ms DOUBLE,             -- whole duration as the headline observer saw it
  tpot_ms DOUBLE,            -- mean time per output token after the first
  prefill_worker VARCHAR,    -- worker that computed the prompt
  decode_worker VARCHAR,     -- worker that decoded
  mode VARCHAR,              -- aggregated, disaggregated or unknown
  model VARCHAR,             -- model
  prompt_tokens BIGINT,      -- prompt tokens
  cached_tokens BIGINT,      -- of them found in a cache
  output_tokens BIGINT,      -- output tokens, summed over streams
  streams BIGINT,            -- streams of the answer (n)
  attempts BIGINT,           -- attempts
  first_token_origin VARCHAR, -- prefill or decode: who made the first delivered token; NULL unknown or aggregated
  outcome VARCHAR,           -- completed, failed, aborted or unknown
  error VARCHAR,             -- error kind or code
  session VARCHAR,           -- session
  turn BIGINT,               -- turn
  tenant VARCHAR,            -- user, team or customer; of an API key only a hash
  route VARCHAR,             -- HTTP route that was called
  streaming BOOLEAN,         -- answer was streamed
  external_id VARCHAR,       -- id that travelled between components
  trace_id VARCHAR,          -- trace
  note VARCHAR               -- remark of a table of requests
);

-- latency of each request as each observer saw it
-- stage: derived
-- key: request, observer
CREATE TABLE observations (
  request VARCHAR,           -- the request
  deployment VARCHAR,        -- deployment
  observer VARCHAR,          -- client, gateway, router, frontend or engine
  leg VARCHAR,               -- outermost leg of that observer
  start_ns BIGINT,           -- start as it saw it
  ttft_ms DOUBLE,            -- time to first delivered token
  e2e_ms DOUBLE,             -- whole duration
  tpot_ms DOUBLE,            -- mean time per output token after the first
  definition VARCHAR,        -- from where to where the TTFT runs
  basis VARCHAR,             -- measured, reported, placed or inferred
  level VARCHAR,             -- evidence level B (instants) or C (durations)
  tpot_stated BOOLEAN,       -- the time per token is the source's own figure: its instants do not give it
  resolution_ns BIGINT       -- resolution
);

-- the partition: every nanosecond of a request's window in exactly one phase
-- stage: derived
CREATE TABLE phases (
  request VARCHAR,           -- the request
  phase VARCHAR,             -- phase (model.PHASES)
  detail VARCHAR,            -- detail (model.PHASE_DETAILS)
  start_ns BIGINT,           -- start
  end_ns BIGINT,             -- end
  worker VARCHAR,            -- worker that the time belongs to
  basis VARCHAR,             -- measured, reported, placed, inferred or upper_bound
  semantics VARCHAR          -- remark on its meaning
);

-- how long each request spent in each kind of work or wait: the pieces of phases, summed
-- stage: derived
-- key: request, detail
CREATE TABLE phase_sums (
  request VARCHAR,           -- the request
  deployment VARCHAR,        -- its deployment
  mode VARCHAR,              -- aggregated, disaggregated or unknown
  counted BOOLEAN,           -- it enters the latency and phase figures (view counted_requests)
  phase VARCHAR,             -- phase
  detail VARCHAR,            -- detail
  duration_ns BIGINT,        -- time spent
  ttft_part_ns BIGINT,       -- of it before the first delivered token; NULL when that is unknown
  basis VARCHAR,             -- the weakest among the pieces
  placed_ns BIGINT,          -- of it neither measured nor reported
  bound_ns BIGINT            -- of it an upper bound
);

-- what the partition had to cut, per request
-- stage: derived
-- key: request
CREATE TABLE partition_checks (
  request VARCHAR,           -- the request
  window_ns BIGINT,          -- length of the window
  clip_ns BIGINT,            -- time cut from intervals that stick out of the window
  overlap_ns BIGINT,         -- time covered by more than one interval
  negative_ns BIGINT         -- sum of negative remainders (kept, not clamped); 0 when none
);

-- offsets between clocks
-- stage: derived
CREATE TABLE clocks (
  deployment VARCHAR,        -- deployment
  domain VARCHAR,            -- clock domain or worker whose clock it is
  reference VARCHAR,         -- domain it is measured against
  offset_ns BIGINT,          -- domain = reference + offset; NULL where messages one way leave one side open
  half_width_ns BIGINT,      -- the offset is known to plus or minus this; NULL unknown
  lower_ns BIGINT,           -- the offset is at least this; NULL no bound
  upper_ns BIGINT,           -- the offset is at most this; NULL no bound
  drift_ppm DOUBLE,          -- drift; NULL unknown
  pairs BIGINT,              -- message pairs or matched requests behind it
  residual_p50_ns BIGINT,    -- median residual of the matches
  residual_p95_ns BIGINT,    -- 95th percentile
  windows BIGINT,            -- stretches of a minute or more that were bounded one by one; NULL for domains without epoch
  infeasible_windows BIGINT, -- of them, those whose bounds cross: a clock step or messages paired wrongly; NULL unknown
  method VARCHAR             -- how it was found
);

-- how many bytes of KV a token takes, by the configuration or by the published shape of the model
-- stage: methods
-- key: deployment, model
CREATE TABLE kv_sizes (
  deployment VARCHAR,        -- deployment
  model VARCHAR,             -- model as the requests name it; NULL where they do not
  bytes_per_token BIGINT,    -- KV bytes of a token over all layers, copies by tensor parallel ranks included; NULL unknown
  block_tokens BIGINT,       -- tokens of a KV block: transfers are rounded up to it; NULL unknown
  tensor_parallel BIGINT,    -- tensor parallel ranks of the prefill side; NULL unknown
  copies DOUBLE,             -- how often each KV head is kept (ranks over heads, at least 1); NULL where the configuration states the bytes
  basis VARCHAR,             -- config (stated), formula (the model's published shape) or unknown
  note VARCHAR               -- source of the shape, what was assumed, or why it is unknown
);

-- how much of each request's KV movements was hidden behind its own prefill, how much it waited for
-- stage: methods
-- key: deployment, request
CREATE TABLE transfer_requests (
  deployment VARCHAR,        -- deployment
  request VARCHAR,           -- the request
  movements BIGINT,          -- movements with start and end
  bytes BIGINT,              -- bytes of all of them; NULL when those of any are unknown
  moved_ms DOUBLE,           -- time during which at least one was under way
  hidden_ms DOUBLE,          -- of it inside the request's own prefill steps; NULL where it met a prefill known as wall time only, or none is known
  exposed_ms DOUBLE,         -- time that the request waited for it: phases kv_transfer and kv_load
  bound_ms DOUBLE            -- of it what is only an upper bound: it lies inside a prefill known as wall time only, which may hide it
);

-- waits between prefill and the start of the transfer, and how much of them a busy link fills
-- stage: methods
-- key: deployment, request
CREATE TABLE transfer_waits (
  deployment VARCHAR,        -- deployment
  request VARCHAR,           -- the request
  wait_ms DOUBLE,            -- time between prefill and transfer (details bridge_wait and kv_space_wait, upper bounds left out)
  busy_ms DOUBLE             -- of it while the worker that sends or the one that receives was moving other KV (the greater of the two)
);

-- which part of each prompt an earlier request of the deployment began with, from the hashes of its blocks (evidence level C)
-- stage: methods
-- key: deployment, request
CREATE TABLE prefix_requests (
  deployment VARCHAR,        -- deployment
  request VARCHAR,           -- the request
  worker VARCHAR,            -- worker that computed the prompt; NULL unknown
  step_tokens BIGINT,        -- prefixes are told apart to so many tokens: a block, or several of them in very long runs; NULL unknown
  steps BIGINT,              -- steps of the prompt that were compared
  seen_steps BIGINT,         -- of them from the first on, those that some earlier request began with
  here_steps BIGINT,         -- of them from the first on, those that an earlier request of the same worker began with; NULL without worker
  seen_tokens BIGINT,        -- seen_steps in tokens, no more than the prompt; NULL unknown
  here_tokens BIGINT,        -- here_steps in tokens, no more than the prompt; NULL unknown
  holders BIGINT,            -- workers that had computed all of seen_steps
  holders_ratio DOUBLE       -- share of all requests (with known worker) that those workers got: the chance to meet one
);

-- the beginnings that prompts share, each from where it branches off a shorter one; the hundred with most to share
-- stage: methods
-- key: deployment, prefix
CREATE TABLE prefix_segments (
  deployment VARCHAR,        -- deployment
  prefix VARCHAR,            -- name of the beginning: hash of all of it
  from_step BIGINT,          -- steps before it belong to a beginning that more requests share
  until_step BIGINT,         -- steps that it is long, from the first token on
  step_tokens BIGINT,        -- tokens of a step; NULL unknown
  requests BIGINT,           -- requests that begin with it
  workers VARCHAR[],         -- workers that computed prompts which begin with it, most requests first
  worker_requests BIGINT[]   -- requests of each of them
);

-- how long a link between workers takes for so many bytes: setup time + bytes / bandwidth
-- stage: methods
-- key: deployment, source_worker, destination_worker, backend, direction, bytes_basis
CREATE TABLE transfer_fits (
  deployment VARCHAR,        -- deployment
  source_worker VARCHAR,     -- where the KV came from; NULL unknown
  destination_worker VARCHAR, -- where it went; NULL unknown
  backend VARCHAR,           -- name of the mover
  direction VARCHAR,         -- prefill_to_decode, decode_to_prefill, load or store
  bytes_basis VARCHAR,       -- measured, config or formula: where the bytes come from
  transfers BIGINT,          -- completed transfers with bytes and duration
  setup_ms DOUBLE,           -- time that a transfer of no bytes would take; NULL cannot tell
  setup_low_ms DOUBLE,       -- 95 % interval, lower end
  setup_high_ms DOUBLE,      -- upper end
  bytes_per_second DOUBLE,   -- bandwidth that large transfers approach; NULL cannot tell
  bytes_per_second_low DOUBLE,  -- 95 % interval, lower end
  bytes_per_second_high DOUBLE, -- upper end
  scatter_ratio DOUBLE,      -- scatter of the times around the line, relative (sigma)
  contention_ratio DOUBLE,   -- how much of its own time a transfer takes longer for each other in flight on the link: 0 room to spare, 1 fair share; NULL cannot tell
  contention_low_ratio DOUBLE,  -- 95 % interval, lower end
  contention_high_ratio DOUBLE, -- upper end
  note VARCHAR               -- what limits the numbers, or why there are none
);

-- offset of a worker's clock minute by minute, where its instants were shifted by it
-- stage: derived
-- key: domain, reference, start_ns
CREATE TABLE clock_windows (
  deployment VARCHAR,        -- deployment
  domain VARCHAR,            -- worker whose clock it is
  reference VARCHAR,         -- worker it is measured against
  start_ns BIGINT,           -- start of the stretch (clock of the reference); it ends where the next begins
  middle_ns BIGINT,          -- instant at which offset_ns holds exactly
  offset_ns BIGINT,          -- domain = reference + offset, and drift x (t - middle_ns); of infeasible stretches between its neighbours
  half_width_ns BIGINT,      -- plus or minus this; NULL where bounds cross
  drift_ppm DOUBLE,          -- drift, the same for all stretches
  feasible BOOLEAN           -- false: bounds cross (a clock step, or messages paired wrongly)
);

-- decode seconds lost to prefill on one worker and rank, from its engine steps (evidence level A)
-- stage: methods
-- key: worker, rank
CREATE TABLE interference_steps (
  worker VARCHAR,            -- the worker
  rank VARCHAR,              -- engine index or data parallel rank inside the worker
  deployment VARCHAR,        -- deployment of the worker
  role VARCHAR,              -- role of the worker
  capture VARCHAR,           -- full, sampled (then nothing is summed) or NULL unknown (likewise)
  steps BIGINT,              -- steps of the rank
  decode_only_steps BIGINT,  -- steps that only decoded, first steps after a KV pull among them
  mixed_steps BIGINT,        -- steps that decoded and computed prompt tokens
  prefill_only_steps BIGINT, -- steps that only computed prompt tokens
  idle_steps BIGINT,         -- steps that did neither
  pulled_steps BIGINT,       -- steps that only took over pulled KV; counted as decode, not as prefill
  decode_only_p50_ms DOUBLE, -- median duration of the decode-only steps
  mixed_p50_ms DOUBLE,       -- median duration of the mixed steps
  prefill_only_p50_ms DOUBLE, -- median duration of the prefill-only steps
  baseline_ms DOUBLE,        -- fitted duration of a decode-only step: constant part
  baseline_per_request_ms DOUBLE,  -- likewise: for each decoding request
  baseline_per_kv_token_ms DOUBLE, -- likewise: for each token of their context; NULL where steps do not say it
  noise_ms DOUBLE,           -- scatter (sigma) of decode-only steps around that fit, at the median batch
  affected_steps BIGINT,     -- steps with prompt tokens during which requests were decoding
  lost_s DOUBLE,             -- decode seconds lost, summed over the requests held up; NULL where it cannot be summed
  lost_low_s DOUBLE,         -- 95 % interval of the loss of this period, lower end
  lost_high_s DOUBLE,        -- upper end
  decode_s DOUBLE,           -- step-counted decode time: sum of step duration x requests decoding; the denominator of lost_ratio
  lost_ratio DOUBLE,         -- lost_s / decode_s
  lost_ratio_low DOUBLE,     -- 95 % block bootstrap interval of the share (would another such period show it), lower end
  lost_ratio_high DOUBLE,    -- upper end
  prefill_only_lost_s DOUBLE, -- part of lost_s from prefill-only steps, a lower bound
  plain_lost_s DOUBLE,       -- cross-check: mixed steps' excess over the decode-only median, x requests decoding
  capped_s DOUBLE,           -- seconds of excess not blamed on prefill, being far above what such prompts cost; NULL without a cost fit
  again_lost_s DOUBLE,       -- of lost_s: taken by preempted requests that were computed again, by their tokens in each step; 0 none
  flagged BOOLEAN,           -- interference is shown: lost_ratio_low > 0.01 and at least 5 affected steps; NULL cannot tell
  note VARCHAR               -- what limits the numbers, or why there are none
);

-- engine steps with prompt tokens during which requests were decoding: what each took from them
-- stage: methods
-- key: worker, rank, seq, start_ns
CREATE TABLE interference_step_losses (
  worker VARCHAR,            -- the worker
  rank VARCHAR,              -- rank inside the worker
  seq BIGINT,                -- iteration number
  start_ns BIGINT,           -- start, or the earliest possible one
  elapsed_ms DOUBLE,         -- duration of the step
  baseline_ms DOUBLE,        -- duration that its decodes alone would have taken; 0 in a prefill-only step
  excess_ms DOUBLE,          -- elapsed - baseline, cut where it is far above what such prompts cost
  residents BIGINT,          -- requests held up
  prefill_requests BIGINT,   -- requests whose prompt was computed
  prefill_tokens BIGINT,     -- prompt tokens computed
  lost_s DOUBLE              -- excess x residents
);

-- decode seconds lost to prefill on one worker (and rank, where requests name it), from token times and prefill intervals (evidence level B)
-- stage: methods
-- key: worker, rank
CREATE TABLE interference_gaps (
  worker VARCHAR,            -- the worker
  rank VARCHAR,              -- data parallel rank inside the worker; NULL: all that stands under its name together
  deployment VARCHAR,        -- deployment of the worker
  role VARCHAR,              -- role of the worker
  observer VARCHAR,          -- who saw the tokens; several joined by +
  streams BIGINT,            -- token streams decoded here with known instants
  gaps BIGINT,               -- gaps between deliveries of tokens that were judged
  clean_gaps BIGINT,         -- of them without a prefill: the baseline
  exposed_gaps BIGINT,       -- of them that met a prefill
  prefills BIGINT,           -- prefill intervals known on this worker
  prefill_s DOUBLE,          -- their summed duration, after the cut
  baseline_ms DOUBLE,        -- duration of a step without a prefill (median over the gaps)
  noise_ms DOUBLE,           -- scatter (sigma) of clean gaps around the baseline
  counted_by VARCHAR,        -- what the time of a gap grows with: emissions, tokens or deliveries
  merged_ratio DOUBLE,       -- share of emissions that came bundled with another
  overlap_s DOUBLE,          -- seconds that gaps and prefills share, summed over the gaps
  credit_s DOUBLE,           -- excess of exposed gaps that prefills explain, before chance is taken off
  chance_s DOUBLE,           -- of that, what stalls of other causes would get by chance
  lost_s DOUBLE,             -- decode seconds lost, summed over the requests held up; NULL where it cannot be told
  lost_low_s DOUBLE,         -- 95 % interval of the loss of this period, lower end
  lost_high_s DOUBLE,        -- upper end
  decode_s DOUBLE,           -- decode time: sum of the judged gaps; the denominator of lost_ratio
  lost_ratio DOUBLE,         -- lost_s / decode_s
  lost_ratio_low DOUBLE,     -- 95 % block bootstrap interval of the share (would another such period show it), lower end
  lost_ratio_high DOUBLE,    -- upper end
  contrast_ratio DOUBLE,     -- share of the shared seconds that was lost, above what chance gives
  p_value DOUBLE,            -- share of shifts of the prefills that put as much excess onto them
  tail_explained_ratio DOUBLE, -- share of the excess of the longest hundredth of gaps that prefills explain
  event_ms DOUBLE,           -- smallest loss that is called an event; NULL where not flagged
  events BIGINT,             -- events called; NULL where not flagged
  offset_ms DOUBLE,          -- by how much prefills were moved onto the clock of the token times; 0 not moved
  best_shift_ms DOUBLE,      -- check: by how much they would have to move further to fit best; 0 within a step
  cut_s DOUBLE,              -- seconds of prefill intervals not counted, being far above what such prompts cost; NULL without a cost fit
  flagged BOOLEAN,           -- interference is shown; NULL cannot tell
  note VARCHAR               -- what limits the numbers, or why there are none
);

-- who took decode seconds from whom (evidence level B); the pairs that are not named are one row without names
-- stage: methods
CREATE TABLE interference_gap_losses (
  worker VARCHAR,            -- the worker
  culprit VARCHAR,           -- request whose prompt was computed; NULL in the row of the remainder
  victim VARCHAR,            -- request held up; NULL in the row of the remainder
  lost_s DOUBLE,             -- seconds
  pairs BIGINT               -- pairs in this row
);

-- single stalls that a prefill made, on workers where interference is shown (evidence level B)
-- stage: methods
CREATE TABLE interference_events (
  worker VARCHAR,            -- the worker
  victim VARCHAR,            -- request held up
  stream BIGINT,             -- its stream
  end_ns BIGINT,             -- end of the gap
  gap_ms DOUBLE,             -- length of the gap
  excess_ms DOUBLE,          -- of it above the baseline
  lost_ms DOUBLE,            -- of that what prefills explain
  culprit VARCHAR            -- request whose prefill shares most time with the gap
);

-- decode seconds lost to others' prompts on one worker (and rank, where requests name it), from the durations of its requests (evidence level C)
-- stage: methods
-- key: deployment, worker, rank
CREATE TABLE interference_requests (
  worker VARCHAR,            -- the worker; NULL where nothing says who served the requests of the deployment
  rank VARCHAR,              -- data parallel rank inside the worker; NULL: all that stands under its name together
  deployment VARCHAR,        -- its deployment
  role VARCHAR,              -- role of the worker
  observer VARCHAR,          -- observer whose instants were used: the innermost that saw nine in ten
  requests BIGINT,           -- requests that it decoded
  usable_requests BIGINT,    -- of them, those with an instant of the first token and a prompt length
  victims BIGINT,            -- of them, those whose decoding can have been held up: 3 tokens or more, duration known, one stream
  unlike_prompts BIGINT,     -- prompts computed while others decoded that differ from the median length by half of it or more
  cached_known BOOLEAN,      -- cached tokens are known for nine in ten; else whole prompts stand for what was computed
  permutations BIGINT,       -- shuffles of prompt lengths that were compared
  p_value DOUBLE,            -- share of shuffles that explain the durations as well as the real lengths do
  lost_s DOUBLE,             -- decode seconds lost, summed over the requests held up: the part that prompt lengths explain, a lower value; NULL cannot tell
  lost_low_s DOUBLE,         -- 95 % interval, lower end; below 0 where nothing is shown
  lost_high_s DOUBLE,        -- upper end: also what each prompt costs whatever its length, which load may explain as well
  decode_s DOUBLE,           -- decode time of the victims: first token to end, summed; the denominator of lost_ratio
  lost_ratio DOUBLE,         -- lost_s / decode_s
  lost_ratio_low DOUBLE,     -- lost_low_s / decode_s
  lost_ratio_high DOUBLE,    -- lost_high_s / decode_s
  lost_per_1000_tokens_ms DOUBLE, -- what 1000 prompt tokens took from each request that was decoding, in the mean
  flagged BOOLEAN,           -- interference is shown: p_value at most 0.01 and lost_ratio_low above 0.01; NULL cannot tell
  note VARCHAR               -- what limits the numbers, or why there are none
);

-- limits (SLO) of this run of pdtrace, class by class; empty where none were given
-- stage: given
-- key: position
CREATE TABLE slo_classes (
  position INTEGER,          -- order: the first class whose conditions a request meets takes it
  class VARCHAR,             -- name of the class
  conditions VARCHAR,        -- its conditions in words; NULL where it takes every request
  model VARCHAR,             -- regular expression for the whole model name; NULL any
  tenant VARCHAR,            -- likewise for the tenant
  session VARCHAR,           -- likewise for the session
  route VARCHAR,             -- likewise for the route
  request VARCHAR,           -- likewise for the request's id
  streaming BOOLEAN,         -- streamed answers or others; NULL any
  prompt_from_tokens BIGINT, -- prompts of at least this many tokens; NULL any
  prompt_below_tokens BIGINT, -- prompts of fewer tokens than this; NULL any
  ttft_ms DOUBLE,            -- limit of the time to first token; NULL none
  tpot_ms DOUBLE,            -- limit of the mean time per output token after the first
  itl_ms DOUBLE,             -- limit of a quantile of the request's own gaps between tokens
  itl_quantile DOUBLE,       -- that quantile, 0 to 1 (1 is the longest gap)
  e2e_ms DOUBLE              -- limit of the whole duration
);

-- fluidity of each request whose token gaps are known, by the deadlines of its class (TTFT limit, then TPOT limit)
-- stage: given
-- key: request
CREATE TABLE slo_fluidity (
  request VARCHAR,           -- the request
  emissions BIGINT,          -- tokens judged; chunks where a chunk's tokens are not known
  on_time BIGINT,            -- of them on time, with the slack that earlier ones left
  missed_deadlines BIGINT,   -- deadlines missed: a stall of ten deadlines misses ten
  fluidity_doc DOUBLE,       -- on time / tokens: the index as documented
  fluidity_code DOUBLE       -- 1 - missed / (met + missed deadlines): the index as the published code counts it
);

-- when things changed: warm-up, changes of level, drift, restarts; of the deployment, or of a worker where the whole does not show it
-- stage: methods
CREATE TABLE changes (
  deployment VARCHAR,        -- the deployment
  worker VARCHAR,            -- the worker that it is about; NULL: the whole deployment
  kind VARCHAR,              -- warm_up, change, drift or restart
  metric VARCHAR,            -- arrival_rate, ttft, tpot or failures; NULL for restarts
  at_ns BIGINT,              -- when: start of the first request after it; of a drift its middle
  at_low_ns BIGINT,          -- 95 % interval of that instant, start
  at_high_ns BIGINT,         -- and end
  from_ns BIGINT,            -- start of the stretch before
  until_ns BIGINT,           -- end of the stretch after
  level_before DOUBLE,       -- level before: requests a second, median (ttft, tpot), share (failures); of a drift the first fifth
  before_low DOUBLE,         -- 95 % interval, lower end
  before_high DOUBLE,        -- upper end
  level_after DOUBLE,        -- level after; of a drift the last fifth
  after_low DOUBLE,          -- 95 % interval, lower end
  after_high DOUBLE,         -- upper end
  unit VARCHAR,              -- requests/s, ms or 1
  requests_before BIGINT,    -- requests in the stretch before
  requests_after BIGINT,     -- requests in the stretch after
  p_value DOUBLE,            -- share of shuffles (warm-up: of stretches of the run) as extreme
  cost_s DOUBLE,             -- seconds of TTFT in the worse stretch above the mean of the better (warm-up: above the median of the rest); NULL for others
  arrival_rate_before DOUBLE, -- requests a second before
  arrival_rate_after DOUBLE, -- and after
  in_flight_before DOUBLE,   -- requests in flight in the mean before; NULL unknown
  in_flight_after DOUBLE,    -- and after
  prompt_tokens_before DOUBLE, -- median prompt before; NULL unknown
  prompt_tokens_after DOUBLE, -- and after
  p99_ms DOUBLE,             -- warm-up: 99th percentile of all
  p99_without_ms DOUBLE,     -- warm-up: 99th percentile without it
  note VARCHAR               -- restarts: what tells of them
);
