-- worker_labels: a short name of each worker for people, unique in its deployment.
--
-- Its own name where no other worker of the deployment has it and it is no hash or number, else its
-- role, with a number where there are several of that role.
--
-- grain:   one row per worker
-- needs:   workers
-- columns:
--   deployment  VARCHAR  deployment
--   worker      VARCHAR  the worker
--   role        VARCHAR  its role; NULL unknown
--   label       VARCHAR  short name
WITH named AS (
  SELECT deployment, worker, role, name,
    count(*) OVER (PARTITION BY deployment, name) = 1 AND name IS NOT NULL
      AND NOT regexp_full_match(replace(replace(name, '-', ''), ':', ''), '[0-9A-Fa-f]{12,}') AS own,
    row_number() OVER (
      PARTITION BY deployment, role ORDER BY coalesce(name, ''), worker
    ) AS place,
    count(*) OVER (PARTITION BY deployment, role) AS of_role
  FROM workers
)
SELECT deployment, worker, role,
  CASE WHEN own AND len(name) > 28 THEN name[:18] || '…' || name[-9:]
    WHEN own THEN name
    WHEN of_role = 1 THEN coalesce(role, 'worker')
    ELSE coalesce(role, 'worker') || '-' || place END AS label
FROM named
