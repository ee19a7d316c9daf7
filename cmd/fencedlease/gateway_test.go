package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencedlease/fencedlease/gateway/ledger/postgres"
	"github.com/fencedlease/fencedlease/sqlfence/pgtest"
)

// TestGatewaySchema: what the command prints is all that the ledger needs.
func TestGatewaySchema(t *testing.T) {
	var schema bytes.Buffer
	cmd := newGatewayCommand()
	cmd.SetArgs([]string{"schema"})
	cmd.SetOut(&schema)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	server := pgtest.Start(t)
	url := server.URL("postgres", "postgres")
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Exec(t.Context(), schema.String()); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := postgres.Open(t.Context(), url, postgres.Options{Wait: time.Second, Keep: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
