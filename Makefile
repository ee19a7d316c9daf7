# Every tool is pinned in hack/tools/go.mod and run by go tool.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

TOOL := go tool -modfile=hack/tools/go.mod
TESTFLAGS ?= -race -shuffle=on -timeout=20m
# The packages of make test.
PACKAGES ?= ./...

##@ Use
.PHONY: demo
demo: control-plane ## Play the paused-worker story on a real API server
	go run ./test/demo

.PHONY: demo-sql
demo-sql: ## Play it on a real PostgreSQL
	go run ./test/demo/sql

.PHONY: demo-gateway
demo-gateway: ## Play it on payments that cannot be taken back
	go run ./test/demo/gateway

.PHONY: run
run: control-plane ## Run an embedded control plane with the operator until interrupted
	go run ./cmd/fencedlease dev

.PHONY: build
build: ## Build the programs into bin/
	CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/...

##@ Develop
.PHONY: control-plane
control-plane: ## Leave etcd, kube-apiserver, kube-controller-manager and kubectl under bin/k8s/<version>
	hack/control-plane.sh >/dev/null

.PHONY: test
test: control-plane ## Run every test on the real API server, with the race detector
	KUBEBUILDER_ASSETS="$$(hack/control-plane.sh)" go test $(TESTFLAGS) $(PACKAGES)

.PHONY: test-postgres
test-postgres: ## Run the SQL fence's tests on PostgreSQL 13 to 18, from npm
	hack/test-postgres.sh

.PHONY: conformance
conformance: control-plane ## Print what each installation answers to each kind of write
	KUBEBUILDER_ASSETS="$$(hack/control-plane.sh)" go test -count=1 -v -run TestConformance ./test/conformance

.PHONY: fuzz
fuzz: ## Fuzz everything that parses, 30 s each
	hack/fuzz.sh 30s

.PHONY: bench-admission
bench-admission: control-plane ## Measure what the fence adds to a write, as ratios within one run
	go run ./test/bench/admission

.PHONY: bench-memory
bench-memory: control-plane ## Measure the operator's memory and idle CPU with 500 leases and 10,000 guarded objects
	go run ./test/bench/memory

.PHONY: bench-handover
bench-handover: control-plane ## Measure hand-overs, and many leases at once, beside client-go's elector
	go run ./test/bench/handover

.PHONY: bench-sql
bench-sql: ## Measure what the SQL fence costs, as ratios within one run
	go run ./test/bench/sqlfence

.PHONY: bench-gateway
bench-gateway: ## Measure what the gateway costs a call, beside the same proxy without a fence
	go run ./test/bench/gateway

.PHONY: generate
generate: ## Write deep copies, apply configurations and docs/api.md
	rm -rf api/v1alpha1/applyconfiguration
	$(TOOL) controller-gen object applyconfiguration:headerFile=hack/boilerplate.go.txt paths=./api/v1alpha1
	$(TOOL) crd-ref-docs --source-path=api/v1alpha1 --config=hack/crd-ref-docs.yaml --renderer=markdown --output-path=docs/api.md --log-level=ERROR

.PHONY: manifests
manifests: ## Write the CRDs, roles and admission manifests under config/ and the chart's templates of them
	$(TOOL) controller-gen crd:maxDescLen=10000 paths=./api/v1alpha1 output:crd:artifacts:config=config/crd/bases
	$(TOOL) controller-gen rbac:roleName=fencedlease paths="./controllers/...;./webhooks/...;./internal/operator/..." output:rbac:artifacts:config=config/rbac
	$(TOOL) controller-gen webhook paths=./webhooks/... output:webhook:artifacts:config=config/webhook
	go run ./hack/gen-policy
	go run ./hack/gen-chart

.PHONY: lint
lint: ## Run golangci-lint, with the Kubernetes API linter in it
	$(TOOL) golangci-lint-kube-api-linter run --allow-parallel-runners

.PHONY: fmt
fmt: ## Format the code
	gofmt -w $$(git ls-files '*.go')

.PHONY: verify
verify: ## Prove that generated files, module files, docs and formatting are fresh
	hack/verify.sh

.PHONY: clean
clean: ## Remove bin/
	rm -rf bin

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*##"} /^[a-zA-Z_0-9-]+:.*?##/ { printf "  %-16s %s\n", $$1, $$2 } /^##@/ { printf "\n%s\n", substr($$0, 5) }' $(MAKEFILE_LIST)
