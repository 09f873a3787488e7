"""The SQL files of the extension, in the installed package or in the checkout."""

import re
from functools import cache
from pathlib import Path

__all__ = [
    "FIND_DEPENDENTS",
    "FIND_INSTALLATION",
    "extension_dir",
    "extra",
    "install_script",
    "missing_installation",
    "upgrade_scripts",
]

FIND_INSTALLATION = """
select to_regprocedure('pgqueue.version()') is not null, exists (
    select from pg_available_extensions where name = 'pgqueue')
"""
# The objects outside of pgqueue that `cascade` drops first. An object that depends on one of these is not listed. A
# view depends through its rule, and a default or a constraint is shown as what it is.
FIND_DEPENDENTS = """
with members (classid, objid) as (
    select 'pg_namespace'::regclass, 'pgqueue'::regnamespace::oid
    union all select 'pg_class'::regclass, c.oid from pg_class c where c.relnamespace = 'pgqueue'::regnamespace
    union all select 'pg_proc'::regclass, p.oid from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace
    union all select 'pg_type'::regclass, t.oid from pg_type t where t.typnamespace = 'pgqueue'::regnamespace
),
dependents as (
    select distinct
        case when r.oid is null then d.classid else 'pg_class'::regclass end as classid,
        coalesce(r.ev_class, d.objid) as objid,
        case when r.oid is null then d.objsubid else 0 end as objsubid,
        coalesce(r.ev_class, t.tgrelid, nullif(c.conrelid, 0), nullif(c.contypid, 0), a.adrelid) as relation
    from pg_depend d
    join members m on (m.classid, m.objid) = (d.refclassid, d.refobjid)
    left join pg_rewrite r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid
    left join pg_trigger t on d.classid = 'pg_trigger'::regclass and t.oid = d.objid
    left join pg_constraint c on d.classid = 'pg_constraint'::regclass and c.oid = d.objid
    left join pg_attrdef a on d.classid = 'pg_attrdef'::regclass and a.oid = d.objid
    where d.deptype in ('n', 'a')
)
select pg_describe_object(d.classid, d.objid, d.objsubid)
from dependents d
where (d.classid, d.objid) not in (select m.classid, m.objid from members m)
    and d.classid <> 'pg_extension'::regclass
    and (d.relation is null or d.relation not in (select m.objid from members m))
order by 1
"""


@cache
def extension_dir() -> Path:
    """The directory of pgqueue.control, pgqueue--*.sql and pgqueue.sql.

    Raises `FileNotFoundError` if none of the known directories has them.
    """
    here = Path(__file__).resolve()
    places = [here.parent / "_extension", *(parent / "extension" for parent in here.parents[1:5])]
    for place in places:
        if (place / "pgqueue.sql").is_file() or any(place.glob("pgqueue--*.sql")):
            return place
    tried = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"the SQL files of pgqueue are in none of {tried}; in a checkout, run make")


def install_script() -> str:
    """The SQL that installs pgqueue without `create extension`, in the caller's transaction or as one query.

    It is the file pgqueue.sql without what is meant for psql: its commands, and `begin` and `commit`. The settings that
    it makes for the transaction end with it.
    """
    script = (extension_dir() / "pgqueue.sql").read_text("utf8")
    script = re.sub(r"(?m)^(\\set .*|begin;|commit;)$", "", script)
    names = re.findall(r"(?m)^set local (\w+)", script)
    save, restore = (
        "".join(
            f"select pg_catalog.set_config('{to}{n}', pg_catalog.current_setting('{of}{n}'), true);\n" for n in names
        )
        for to, of in (("pgqueue.before_", ""), ("", "pgqueue.before_"))
    )
    return f"{save}{script}\n{restore}"


def missing_installation(is_installed: bool, is_offered: bool) -> str | None:
    """The SQL that installs pgqueue where FIND_INSTALLATION has these results; None if the database has it."""
    if is_installed:
        return None
    return "create extension if not exists pgqueue" if is_offered else install_script()


def upgrade_scripts(before: str, after: str) -> list[str] | None:
    """The SQL scripts that upgrade an installation without `create extension`, in order. None if no path exists.

    They are the scripts of `alter extension`, without what is meant for psql and for an extension.
    """
    steps: dict[str, list[Path]] = {}
    for file in sorted(extension_dir().glob("pgqueue--*--*.sql")):
        steps.setdefault(file.name.split("--")[1], []).append(file)
    paths: list[tuple[str, list[Path]]] = [(before, [])]
    seen = {before}
    for at, files in paths:  # breadth first, so the path with the fewest scripts is found
        if at == after:
            return [_without_extension(file.read_text("utf8")) for file in files]
        for file in steps.get(at, []):
            to = file.stem.split("--")[2]
            if to not in seen:
                seen.add(to)
                paths.append((to, [*files, file]))
    return None


def _without_extension(script: str) -> str:
    return re.sub(r"(?m)^(\\echo .*|select pg_extension_config_dump\(.*\);)$", "", script)


def extra(name: str) -> str:
    """The shell command that installs an extra of this package, from the checkout if the package runs in one."""
    project = Path(__file__).resolve().parents[2]
    if (project / "pyproject.toml").is_file():
        return f"pip install -e '{project}[{name}]'"
    return f"pip install 'pgqueue-sql[{name}]'"
