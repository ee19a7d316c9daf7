-- What the gateway's replicas share, beside the SQL fence's tables: a lease's
-- record is the one in fence.lease, for both. Installing again changes nothing.

DO $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'fence_gateway') THEN
    CREATE ROLE fence_gateway NOLOGIN;
  END IF;
END $$;

-- The token of each key's calls in flight, and of the last ones. Every call in
-- flight of a key shares a lock on it and has the token of its row: the row
-- changes only under the exclusive lock, once the older calls have ended.
CREATE TABLE IF NOT EXISTS fence.call_key (
  lease text NOT NULL CHECK (length(lease) BETWEEN 3 AND 127),
  key text NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
  token bigint NOT NULL CHECK (token BETWEEN 1 AND 9007199254740991),
  PRIMARY KEY (lease, key)
) WITH (fillfactor = 70);

-- Calls with an idempotency key. No answer: the outcome is unknown.
CREATE TABLE IF NOT EXISTS fence.call_outcome (
  lease text NOT NULL,
  key text NOT NULL,
  idempotency_key text NOT NULL CHECK (length(idempotency_key) BETWEEN 1 AND 255),
  token bigint NOT NULL,
  digest bytea NOT NULL,
  answer bytea,
  expires timestamptz NOT NULL,
  PRIMARY KEY (lease, key, idempotency_key)
);
CREATE INDEX IF NOT EXISTS call_outcome_expires ON fence.call_outcome (expires);

REVOKE ALL ON fence.call_key, fence.call_outcome FROM PUBLIC;
GRANT SELECT, INSERT, UPDATE, DELETE ON fence.call_key, fence.call_outcome TO fence_gateway;
