-- The SQL fence: a transaction writes to a guarded table only after it has
-- presented a token that is the recorded one of its lease, and shares a lock on
-- the lease until it ends. A newer token takes that lock for itself, so it waits
-- for the older transactions and then shuts them out.
--
-- The lock is an advisory one of the transaction, which costs no write. It is
-- released after the transaction's changes are visible, so at READ COMMITTED
-- whoever has it and reads the record then reads the newest. Where a snapshot is
-- older than its statement the record's row is locked too, and the database
-- answers 40001 if it has moved on.
--
-- Installing again upgrades; nothing that is recorded is lost.

CREATE SCHEMA IF NOT EXISTS fence;

DO $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'fence_operator') THEN
    CREATE ROLE fence_operator NOLOGIN;
  END IF;
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'fence_bypass') THEN
    CREATE ROLE fence_bypass NOLOGIN;
  END IF;
END $$;

-- The recorded token of each lease ("namespace/name"). Analyzed from its first row
-- on: so small a table is read quicker without its index.
CREATE TABLE IF NOT EXISTS fence.lease (
  lease text PRIMARY KEY CHECK (length(lease) BETWEEN 3 AND 127),
  token bigint NOT NULL CHECK (token BETWEEN 1 AND 9007199254740991)
) WITH (fillfactor = 50, autovacuum_analyze_threshold = 0);

-- The record as a transaction says that it has presented it. It stands here so that
-- no transaction has to put it together.
ALTER TABLE fence.lease ADD COLUMN IF NOT EXISTS mark text NOT NULL
  GENERATED ALWAYS AS ('|' || lease || '=' || token::text || '|') STORED;

-- Settings of the installation: one row.
CREATE TABLE IF NOT EXISTS fence.setting (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  -- strict reserves advancing to fence_operator.
  strict boolean NOT NULL DEFAULT false,
  -- wait bounds how long present waits for older transactions.
  wait interval NOT NULL DEFAULT '10 seconds' CHECK (wait BETWEEN '1 millisecond' AND '1 hour')
);
INSERT INTO fence.setting DEFAULT VALUES ON CONFLICT DO NOTHING;

-- What was done past the fence, by whom and why. A row of the running
-- transaction is what lets it through: nobody but bypass can write one.
CREATE TABLE IF NOT EXISTS fence.audit (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  transaction text NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  account name NOT NULL,
  action text NOT NULL,
  reason text NOT NULL CHECK (length(reason) BETWEEN 1 AND 1000)
);
CREATE INDEX IF NOT EXISTS audit_transaction ON fence.audit (transaction);

CREATE OR REPLACE FUNCTION fence.version() RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '1'::text $$;

CREATE OR REPLACE FUNCTION fence.stale(lease text, token bigint, recorded bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'FL001',
    MESSAGE = pg_catalog.format('StaleToken: [%s] token %s is stale; recorded %s; stop: a newer holder has written here', lease, token, recorded),
    HINT = 'Acquire the lease anew, and begin another transaction.';
END $$;

-- Presents a token for the rest of the transaction.
--
-- Errors: FL001 a newer token is recorded; FL003 no lease or token;
-- FL004 older transactions did not end within the limit; FL005 the token is
-- higher than the recorded one, and advancing is reserved to fence_operator.
--
-- This one and the triggers run in every transaction. A SET clause would cost them
-- more than all they do, and so would a function called by another. So every name in
-- them is qualified, operators included (nobody's search_path decides what runs here),
-- and the usual case is written out: READ COMMITTED, the token is the recorded one.
CREATE OR REPLACE FUNCTION fence.present(lease text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  BEGIN
    IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
      AND pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtextextended(lease, 439804651365)) THEN
      PERFORM pg_catalog.set_config('fence.presented', l.mark OPERATOR(pg_catalog.||) coalesce(pg_catalog.current_setting('fence.presented', true), ''), true)
        FROM fence.lease l WHERE l.lease OPERATOR(pg_catalog.=) present.lease AND l.token OPERATOR(pg_catalog.=) present.token;
      IF FOUND THEN
        RETURN;
      END IF;
      -- Let go of the lock: two that share it and both want to advance would wait for each other.
      RAISE EXCEPTION USING ERRCODE = 'FL000';
    END IF;
  EXCEPTION WHEN SQLSTATE 'FL000' THEN
    NULL;
  END;
  PERFORM fence.present(lease, token, NULL, false);
END $$;

-- Tells whether this transaction has presented the recorded token, and keeps it
-- the recorded one until the end of the transaction. It does not wait.
CREATE OR REPLACE FUNCTION fence.holds(lease text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtextextended(lease, 439804651365)) THEN
    RETURN false;
  END IF;
  IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed' THEN
    PERFORM FROM fence.lease l WHERE l.lease OPERATOR(pg_catalog.=) holds.lease
      AND pg_catalog.strpos(pg_catalog.current_setting('fence.presented', true), l.mark) OPERATOR(pg_catalog.>) 0;
  ELSE
    PERFORM FROM fence.lease l WHERE l.lease OPERATOR(pg_catalog.=) holds.lease
      AND pg_catalog.strpos(pg_catalog.current_setting('fence.presented', true), l.mark) OPERATOR(pg_catalog.>) 0 FOR SHARE;
  END IF;
  RETURN FOUND;
END $$;

-- The same with a limit of its own for older transactions, NULL for the
-- setting's. With terminate, which needs the role fence_operator, the backends
-- of older transactions are ended once the limit is over.
CREATE OR REPLACE FUNCTION fence.present(lease text, token bigint, wait interval, terminate boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  recorded bigint;
  reserved boolean;
  usual interval;
  was text := current_setting('lock_timeout');
  ended int := 0;
BEGIN
  IF lease IS NULL OR lease !~ '^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-.a-z0-9]*[a-z0-9])?$' OR length(lease) > 127 THEN
    RAISE EXCEPTION USING ERRCODE = 'FL003',
      MESSAGE = format('MalformedToken: lease %s must be namespace/name', coalesce(quote_literal(left(lease, 64)), 'NULL'));
  END IF;
  IF token IS NULL OR token NOT BETWEEN 1 AND 9007199254740991 THEN
    RAISE EXCEPTION USING ERRCODE = 'FL003',
      MESSAGE = format('MalformedToken: [%s] malformed token %s: it must be from 1 to 9007199254740991', lease, coalesce(token::text, 'NULL'));
  END IF;
  SELECT s.strict, s.wait INTO reserved, usual FROM fence.setting s;
  wait := coalesce(wait, usual);
  IF wait < '1 millisecond' OR wait > '1 hour' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('wait %s must be from 1 ms to 1 h', wait);
  END IF;
  IF terminate AND NOT pg_has_role(session_user, 'fence_operator', 'MEMBER') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('%s may not end other backends: that needs the role fence_operator', session_user);
  END IF;
  LOOP
    BEGIN
      PERFORM set_config('lock_timeout', (extract(epoch FROM wait) * 1000)::bigint::text, true);
      SELECT l.token INTO recorded FROM fence.lease l WHERE l.lease = present.lease;
      IF recorded > token THEN
        PERFORM fence.stale(lease, token, recorded);
      ELSIF recorded = token THEN
        PERFORM pg_advisory_xact_lock_shared(hashtextextended(lease, 439804651365));
      ELSE
        IF reserved AND NOT pg_has_role(session_user, 'fence_operator', 'MEMBER') THEN
          RAISE EXCEPTION USING ERRCODE = 'FL005', MESSAGE = format(
            'UnissuedToken: [%s] token %s was never issued; recorded %s; the operator advances this fence', lease, token, coalesce(recorded::text, 'none'));
        END IF;
        PERFORM pg_advisory_xact_lock(hashtextextended(lease, 439804651365));
        -- Shared as well: fence.holds does not wait, and so would not get it where
        -- a newer token waits already, not even beside one's own.
        PERFORM pg_advisory_xact_lock_shared(hashtextextended(lease, 439804651365));
        INSERT INTO fence.lease AS l VALUES (present.lease, present.token)
          ON CONFLICT ON CONSTRAINT lease_pkey DO UPDATE SET token = excluded.token WHERE l.token < excluded.token;
      END IF;
      -- What this transaction has presented stands in a setting that ends with it, as
      -- the marks of records, the newest first. Anybody may set it: what counts is the
      -- record, read under the lock. Here too: somebody may have been faster.
      PERFORM set_config('fence.presented', concat('|', lease, '=', token, '|', current_setting('fence.presented', true)), true);
      IF NOT fence.holds(lease) THEN
        SELECT l.token INTO recorded FROM fence.lease l WHERE l.lease = present.lease;
        PERFORM fence.stale(lease, token, recorded);
      END IF;
      EXIT;
    EXCEPTION WHEN lock_not_available THEN
      IF terminate AND ended < 3 THEN
        PERFORM pg_terminate_backend(pid) FROM pg_locks
          WHERE locktype = 'advisory' AND objsubid = 1
            AND (classid::bigint << 32 | objid::bigint) = hashtextextended(present.lease, 439804651365)
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid();
        ended := ended + 1;
        wait := '1 second';
      ELSE
        RAISE EXCEPTION USING ERRCODE = 'FL004',
          MESSAGE = format('WaitLimit: [%s] older transactions did not end within %s; try again, or end them', lease, wait);
      END IF;
    END;
  END LOOP;
  PERFORM set_config('lock_timeout', was, true);
END $$;

-- The same for a token as text: only its canonical decimal form is one.
CREATE OR REPLACE FUNCTION fence.present(lease text, token text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF token IS NULL OR token !~ '^[1-9][0-9]{0,15}$' OR token::bigint > 9007199254740991 THEN
    RAISE EXCEPTION USING ERRCODE = 'FL003',
      MESSAGE = format('MalformedToken: [%s] malformed token %s: it must be decimal digits from 1 to 9007199254740991, with no sign, blank or leading zero',
        left(lease, 127), coalesce(quote_literal(left(token, 24)), 'NULL'));
  END IF;
  PERFORM fence.present(lease, token::bigint);
END $$;

-- Judges a write of this transaction to what a lease guards.
CREATE OR REPLACE FUNCTION fence.check(lease text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  IF NOT fence.holds(lease) THEN
    PERFORM fence.refuse(lease);
  END IF;
END $$;

-- Says why a write does not count, unless its transaction bypasses the fence.
CREATE OR REPLACE FUNCTION fence.refuse(lease text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  token text := substring(split_part(current_setting('fence.presented', true), concat('|', lease, '='), 2) FROM '^([0-9]{1,16})\|');
  recorded bigint;
BEGIN
  IF token IS NULL THEN
    IF fence.bypassed() THEN
      RETURN;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'FL002',
      MESSAGE = format('Unstamped: [%s] the transaction presents no token', lease),
      HINT = 'Call fence.present(lease, token) in this very transaction: what a statement of its own presents ends with it.';
  END IF;
  SELECT l.token INTO recorded FROM fence.lease l WHERE l.lease = refuse.lease;
  IF recorded > token::bigint THEN
    PERFORM fence.stale(lease, token::bigint, recorded);
  END IF;
  RAISE EXCEPTION USING ERRCODE = 'FL002',
    MESSAGE = format('Unstamped: [%s] token %s was not presented; recorded %s; call fence.present', lease, token, coalesce(recorded::text, 'none'));
END $$;

-- Tells whether this very transaction has called fence.bypass. The setting only
-- saves a look: the row counts, and nobody but fence.bypass can write one.
CREATE OR REPLACE FUNCTION fence.bypassed() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN coalesce(current_setting('fence.bypassed', true), '') <> ''
    AND EXISTS (SELECT FROM fence.audit a WHERE a.transaction = txid_current()::text AND a.action = 'bypass');
END $$;

-- The trigger of a table that one lease guards; its argument is the lease.
CREATE OR REPLACE FUNCTION fence.guard_table() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  -- As fence.holds does.
  IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'
    AND pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtextextended(TG_ARGV[0], 439804651365)) THEN
    PERFORM FROM fence.lease l WHERE l.lease OPERATOR(pg_catalog.=) TG_ARGV[0]
      AND pg_catalog.strpos(pg_catalog.current_setting('fence.presented', true), l.mark) OPERATOR(pg_catalog.>) 0;
    IF FOUND THEN
      RETURN NULL; -- which skips nothing: it runs before a statement or after a row
    END IF;
  END IF;
  PERFORM fence.check(TG_ARGV[0]);
  RETURN NULL;
END $$;

-- The trigger of a table whose rows name their lease in a column; its argument
-- is the column. It runs after the row is written, so that no other trigger
-- changes the column behind its back. There is no row to judge in TRUNCATE.
CREATE OR REPLACE FUNCTION fence.guard_row() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  before text;
  after text;
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    IF fence.bypassed() THEN
      RETURN NULL;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'FL002',
      MESSAGE = format('Unstamped: %s names a lease in each row, and TRUNCATE has none to judge; delete the rows, or bypass with a reason', TG_RELID::regclass);
  END IF;
  IF TG_OP <> 'INSERT' THEN
    before := to_jsonb(OLD) ->> TG_ARGV[0];
  END IF;
  IF TG_OP <> 'DELETE' THEN
    after := to_jsonb(NEW) ->> TG_ARGV[0];
  END IF;
  IF before IS NOT NULL THEN
    PERFORM fence.check(before);
  END IF;
  IF after IS NOT NULL AND after IS DISTINCT FROM before THEN
    PERFORM fence.check(after);
  END IF;
  IF before IS NOT NULL AND after IS NULL AND TG_OP = 'UPDATE' THEN
    RAISE EXCEPTION USING ERRCODE = 'FL002',
      MESSAGE = format('FenceRemoved: [%s] the row of %s would no longer name a lease; delete it, or bypass with a reason', before, TG_RELID::regclass);
  END IF;
  RETURN NULL;
END $$;

-- Puts a table, its partitions and its inheritance children under the fence:
-- either of one lease, or of the lease that each row names in a column.
-- Whoever owns the table may. It replaces what was there.
CREATE OR REPLACE FUNCTION fence.guard(relation regclass, lease text DEFAULT NULL, lease_column name DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  target regclass;
  kind "char";
  parent boolean;
BEGIN
  IF (lease IS NULL) = (lease_column IS NULL) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'give either a lease or a column that names one';
  END IF;
  IF lease IS NOT NULL AND (lease !~ '^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-.a-z0-9]*[a-z0-9])?$' OR length(lease) > 127) THEN
    RAISE EXCEPTION USING ERRCODE = 'FL003', MESSAGE = format('lease %L must be namespace/name', lease);
  END IF;
  IF lease_column IS NOT NULL AND NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = relation AND attname = lease_column AND NOT attisdropped AND attnum > 0) THEN
    RAISE EXCEPTION USING ERRCODE = '42703', MESSAGE = format('%s has no column %I', relation, lease_column);
  END IF;
  PERFORM fence.unguard(relation);
  FOR target, kind, parent IN
    SELECT c.oid::regclass, c.relkind, c.relispartition FROM pg_class c
    WHERE c.oid IN (WITH RECURSIVE tree AS (SELECT relation::oid AS oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid) SELECT oid FROM tree)
    ORDER BY c.oid = relation DESC
  LOOP
    IF kind NOT IN ('r', 'p') THEN
      RAISE EXCEPTION USING ERRCODE = '42809', MESSAGE = format('%s is not a table of this database: it cannot be guarded', target);
    END IF;
    IF lease IS NOT NULL AND kind = 'r' AND NOT parent THEN
      EXECUTE format('CREATE TRIGGER fence_write BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH STATEMENT EXECUTE FUNCTION fence.guard_table(%L)', target, lease);
      -- The worker of a subscription fires no trigger of a statement.
      EXECUTE format('CREATE TRIGGER fence_replica AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION fence.guard_table(%L)', target, lease);
      EXECUTE format('ALTER TABLE %s ENABLE REPLICA TRIGGER fence_replica', target);
    ELSIF lease IS NOT NULL AND kind = 'p' AND target = relation THEN
      -- Clones of a row trigger guard partitions that are written directly, and those to come.
      EXECUTE format('CREATE TRIGGER fence_write AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION fence.guard_table(%L)', target, lease);
    ELSIF lease_column IS NOT NULL AND (target = relation OR NOT parent) THEN
      EXECUTE format('CREATE TRIGGER fence_write AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION fence.guard_row(%L)', target, lease_column);
    END IF;
    EXECUTE format('CREATE TRIGGER fence_truncate BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%L)', target,
      CASE WHEN lease IS NULL THEN 'fence.guard_row' ELSE 'fence.guard_table' END, coalesce(lease, lease_column::text));
    -- Also where session_replication_role is replica.
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER fence_write, ENABLE ALWAYS TRIGGER fence_truncate', target);
  END LOOP;
END $$;

-- Takes a table, its partitions and children out of the fence.
CREATE OR REPLACE FUNCTION fence.unguard(relation regclass)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  target regclass;
  name name;
BEGIN
  FOR target IN
    WITH RECURSIVE tree AS (SELECT relation::oid AS oid UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid)
    SELECT oid::regclass FROM tree ORDER BY oid = relation DESC
  LOOP
    -- The root comes first, and takes its clones along.
    FOR name IN SELECT tgname FROM pg_trigger WHERE tgrelid = target AND tgname IN ('fence_write', 'fence_replica', 'fence_truncate') LOOP
      EXECUTE format('DROP TRIGGER %I ON %s', name, target);
    END LOOP;
  END LOOP;
END $$;

-- Lets the rest of the transaction write past the fence. Audited; needs the
-- role fence_bypass.
CREATE OR REPLACE FUNCTION fence.bypass(reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO fence.audit (transaction, account, action, reason) VALUES (txid_current()::text, session_user, 'bypass', reason);
  PERFORM set_config('fence.bypassed', 'on', true);
END $$;

-- Sets a lease's record, down as well as up: for restores alone. Audited;
-- needs the role fence_operator.
CREATE OR REPLACE FUNCTION fence.reset(lease text, token bigint, reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO fence.audit (transaction, account, action, reason)
    VALUES (txid_current()::text, session_user, format('reset %s to %s', lease, token), reset.reason);
  INSERT INTO fence.lease AS l VALUES (reset.lease, reset.token) ON CONFLICT ON CONSTRAINT lease_pkey DO UPDATE SET token = excluded.token;
END $$;

-- What is guarded, and what is not although one would think so.
CREATE OR REPLACE VIEW fence.guarded AS
  SELECT t.tgrelid::regclass AS relation,
         CASE t.tgfoid WHEN 'fence.guard_table'::regproc THEN 'lease' ELSE 'column' END AS by,
         convert_from(substring(t.tgargs FROM 1 FOR length(t.tgargs) - 1), 'UTF8') AS value,
         t.tgenabled = 'A' AND (t.tgtype & 1 = 1 OR EXISTS (
           SELECT FROM pg_trigger r WHERE r.tgrelid = t.tgrelid AND r.tgname = 'fence_replica' AND r.tgenabled IN ('R', 'A'))) AS always
  FROM pg_trigger t WHERE t.tgname = 'fence_write' AND t.tgfoid IN ('fence.guard_table'::regproc, 'fence.guard_row'::regproc);

CREATE OR REPLACE VIEW fence.finding AS
  SELECT g.relation, 'its trigger is disabled, or does not fire for replication; run fence.guard again' AS problem FROM fence.guarded g WHERE NOT g.always
  UNION ALL
  SELECT i.inhrelid::regclass, 'it is a child of a guarded table and not guarded; run fence.guard on the parent again'
    FROM pg_inherits i JOIN fence.guarded g ON g.relation = i.inhparent
    WHERE NOT EXISTS (SELECT FROM fence.guarded c WHERE c.relation = i.inhrelid)
  UNION ALL
  SELECT g.relation, 'TRUNCATE is not guarded; run fence.guard on it, or on its root, again' FROM fence.guarded g
    WHERE NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = g.relation AND t.tgname = 'fence_truncate' AND t.tgenabled = 'A')
  UNION ALL
  SELECT k.conrelid::regclass, 'it refers to the guarded table ' || g.relation || ' and is not guarded itself'
    FROM pg_constraint k JOIN fence.guarded g ON g.relation = k.confrelid
    WHERE k.contype = 'f' AND NOT EXISTS (SELECT FROM fence.guarded c WHERE c.relation = k.conrelid);

REVOKE ALL ON ALL TABLES IN SCHEMA fence FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fence FROM PUBLIC;
GRANT USAGE ON SCHEMA fence TO PUBLIC;
GRANT SELECT ON fence.lease, fence.guarded, fence.finding TO PUBLIC;
GRANT EXECUTE ON FUNCTION fence.version(), fence."check"(text), fence.present(text, bigint), fence.present(text, bigint, interval, boolean), fence.present(text, text),
  fence.guard(regclass, text, name), fence.unguard(regclass), fence.guard_table(), fence.guard_row() TO PUBLIC;
GRANT EXECUTE ON FUNCTION fence.bypass(text) TO fence_bypass;
GRANT EXECUTE ON FUNCTION fence.reset(text, bigint, text) TO fence_operator;
GRANT SELECT ON fence.audit, fence.setting TO fence_operator;
GRANT UPDATE (strict, wait) ON fence.setting TO fence_operator;
