"""`stoker fetch` and `stoker cache`: data that lie elsewhere, and what is kept of them here."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from tyro.conf import Positional, UseAppendAction

from stoker import console
from stoker.cli.options import Flag, local, no_overrides
from stoker.cli.output import print_result
from stoker.errors import UserError


@dataclass(frozen=True)
class Fetch:
    """Copy a data set from an object store or a slow disk, once: many files at a time, verified, going on where it was.
    Without DIR a local folder is only read through, which warms a disk that loads lazily."""

    source: Positional[str]  # s3://, gs://, az:// or a local folder
    out: Positional[str | None] = None  # folder to fill
    subset: UseAppendAction[list[str]] = field(default_factory=list)  # pattern of names, such as 'train/n014*'; several
    threads: int = 16  # files at a time
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("fetch", overrides)
        from stoker.data.locations import named
        from stoker.data.storage.hydrate import fetch

        if self.threads < 1:
            raise UserError(f"--threads is {self.threads}; at least one is needed.")
        done = fetch(named(self.source), None if self.out is None else local(self.out), self.subset, self.threads)
        text = f"{done.files:,} files, {done.num_bytes / 1e6:,.1f} MB"
        there = f" ({done.already:,} were there)" if done.already else ""
        print_result(asdict(done), f"{text}{there} {f'in {self.out}' if self.out else 'read'}", as_json=self.json)
        return 0


@dataclass(frozen=True)
class Cache:
    """Show what the cache holds, verify its pieces of remote data, or clear it. STOKER_CACHE_BYTES sets its budget."""

    action: Positional[Literal["show", "verify", "clear"]] = "show"
    all: Flag = False  # of clear: also what was simulated, drawn, packed and listed, which would be made again
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("cache", overrides)
        from stoker.data.cache import budget_bytes, cache_folder
        from stoker.data.storage import keeping

        if self.all and self.action != "clear":
            raise UserError("--all is for `stoker cache clear` only.")
        if self.action == "verify":
            whole, damaged, strays = keeping.verify()
            text = f"{whole:,} pieces are whole; {damaged:,} were damaged and {strays:,} belonged to nothing: removed"
            print_result({"whole": whole, "damaged": damaged, "strays": strays}, text, as_json=self.json)
            return 1 if damaged else 0
        if self.action == "clear":
            freed = keeping.clear(made=self.all)
            print_result({"freed_bytes": freed}, f"{freed / 1e6:,.1f} MB freed", as_json=self.json)
            return 0
        kept, budget = keeping.show(), budget_bytes()
        total = sum(one.num_bytes for one in kept)
        rows = [("what", "MB", "pieces", "in use")]
        rows += [
            (one.name, f"{one.num_bytes / 1e6:,.1f}", f"{one.pieces or '-'}", f"{one.in_use or '-'}") for one in kept
        ]
        text = f"{console.table(rows)}\n{total / 1e6:,.1f} of {budget / 1e6:,.1f} MB in {cache_folder()}"
        result = {
            "folder": str(cache_folder()),
            "budget_bytes": budget,
            "bytes": total,
            "kept": list(map(asdict, kept)),
        }
        print_result(result, text, as_json=self.json)
        return 0
