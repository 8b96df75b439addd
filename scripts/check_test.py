#!/usr/bin/env python3
"""Each rule of check.py reports a tree that breaks it, and accepts a tree that does not."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check

PAGE = """\
| room | floor | may include | charter |
|---|---|---|---|
| `base` | 1 | - | the ground |
| `io` | 2 | `base` | files |
| `kernels` | 2 | `base` | arithmetic |
| `stream` | 3 | `base` `io` | runs |
| `cli` | 4 | every public header | verbs |
| `python` | 4 | every public header | bindings |

| library header | only in |
|---|---|
| `hwy/` | `kernels` |
"""
CMAKE = """\
modicum_room(base)
modicum_room(io DEPENDS base PRIVATE fast::library)
modicum_room(kernels DEPENDS base)
modicum_room(stream DEPENDS base io)
modicum_room(cli DEPENDS base io
             kernels stream)
"""
MORE_PARAMETERS = """\
| room or folder | functions with more than five parameters |
|---|---|
| `io` | `old` `a lambda` |
"""
COMMAND_LINE = """\
## Every verb

| `-q,--quiet` | nothing but errors |

## `plan` and `load`

| `--ranks INT` | rank processes |

## `step`

| `--quiet` | again |
"""
README = """\
# The name

See [rooms](docs/ARCHITECTURE.md), [below](#how-it-works),
[plan](docs/reference/command-line.md#plan-and-load),
`modicum/ROOM/ROOM.h`, `tests/*.json`, `main.cc`.

## How it works

```sh
torchrun --nproc 4 examples/train.py DIR --steps 3
build/release/modicum plan DIR --ranks 8 \\
    --quiet
```
"""
SIX = "int a, int b, int c, int d, int e, int f"
GOOD = {
    "CONTRIBUTING.md": "Five parameters at most.\n",
    "docs/ARCHITECTURE.md": PAGE,
    "docs/reference/command-line.md": COMMAND_LINE,
    "README.md": README,
    "CMakeLists.txt": CMAKE,
    "modicum/base/base.h": "#pragma once\n",
    "modicum/base/sizes.h": "#pragma once\n",
    "modicum/base/sizes.cc": '#include "modicum/base/sizes.h"\n#include <vector>\n',
    "modicum/io/io.h": '#include "modicum/base/base.h"\n',
    "modicum/io/file_doubles.h": "#pragma once\n",
    "modicum/kernels/cast.cc": "#include <hwy/highway.h>\n",
    "modicum/stream/load_test.cc": '#include "modicum/io/file_doubles.h"\n',
    "modicum/cli/main.cc": '#include "modicum/io/io.h"\nadd("-q,--quiet");\nadd("--ranks");\n',
    "examples/train.py": "parser.add_argument('--steps')\n",
    "modicum/python/modicum/errors.py": "class Error(Exception): ...\n",
    "modicum/python/modicum/__init__.py": "from modicum.errors import Error\n",
    "tests/test_ranks.py": "import ranks\nNAMES = (ranks, 'bytes.json')\n",
    "tests/support/ranks.py": "",
    "tests/bytes.json": "{}",
    "mutants/io.toml": "",
    "scripts/mutants.py": "",
    "scripts/run.sh": "exec scripts/mutants.py needs-$group.txt\n",
    "scripts/needs-test.txt": "",
    "Makefile": "all:\n\tscripts/run.sh\n",
}


def long_function(lines: int, head: str = "int f()") -> str:
    """A function with this number of lines, its braces included."""
    return head + " {\n" + "  g();\n" * (lines - 2) + "}\n"


class Check(unittest.TestCase):
    def findings(self, changed: dict[str, str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name, text in (GOOD | changed).items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return check.findings(root)

    def accepts(self, changed: dict[str, str]) -> None:
        self.assertEqual(self.findings(changed), [])

    def refuses(self, changed: dict[str, str], where: str, what: str) -> None:
        found = self.findings(changed)
        self.assertTrue(found, "nothing was found")
        self.assertIn(where, found[0])
        self.assertIn(what, found[0])

    def source(self, path: str, text: str, what: str) -> None:
        """Asserts that a file with this text is reported."""
        self.refuses({path: text}, path, what)

    def page(self, old: str, new: str, what: str, cmake: tuple[str, str] = ("", "")) -> None:
        """Asserts that a change of the page's table is reported."""
        changed = {"docs/ARCHITECTURE.md": PAGE.replace(old, new)}
        changed["CMakeLists.txt"] = CMAKE.replace(*cmake)
        self.refuses(changed, "ARCHITECTURE.md", what)


class Includes(Check):
    def test_the_good_tree_is_good(self) -> None:
        self.accepts({})

    def test_a_room_that_the_table_does_not_allow(self) -> None:
        text = '#include "modicum/kernels/kernels.h"\n'
        self.source("modicum/stream/load.cc", text, "`stream` may not include `kernels`")

    def test_a_room_on_a_higher_floor(self) -> None:
        text = '#include "modicum/io/io.h"\n'
        self.source("modicum/base/sizes.cc", text, "`base` may not include `io`")

    def test_an_internal_header_of_another_room(self) -> None:
        text = '\n#  include "modicum/base/sizes.h"\n'
        self.source("modicum/io/posix.cc", text, "is internal: use modicum/base/base.h")
        self.source("tests/walk.cc", text, "is internal")

    def test_an_internal_header_in_angle_brackets(self) -> None:
        self.source("modicum/io/posix.cc", "#include <modicum/base/sizes.h>\n", "is internal")

    def test_doubles_outside_tests(self) -> None:
        text = '#include "modicum/io/file_doubles.h"\n'
        self.source("modicum/stream/load.cc", text, "is for tests")
        self.source("modicum/kernels/cast_test.cc", text, "`kernels` may not include `io`")

    def test_a_relative_name(self) -> None:
        self.source("modicum/base/sizes.cc", '#include "sizes.h"\n', "not named from the root")

    def test_a_room_that_is_not_there(self) -> None:
        text = '#include "modicum/attic/attic.h"\n'
        self.source("modicum/cli/main.cc", text, "is in no room")
        self.source("modicum/attic/attic.h", "#pragma once\n", "modicum/attic is no room")

    def test_a_library_outside_its_room(self) -> None:
        self.source("modicum/stream/load.cc", "#include <hwy/highway.h>\n", "only in kernels")


class Changes(Check):
    def test_cxx_that_changes_files(self) -> None:
        text = """\
void f() {
  ::unlink(path);
  unlinkat(at, name, 0);
  rmdir(path);
  ::rename(from, to);
  renameat2(a, b, c, d, 0);
  std::remove(path);
  std::filesystem::remove_all(path);
  fs::copy_file(from, to);
  mkdir(path, 0777);
  ::mkdirat(at, name, 0777);
  symlink(target, path);
  linkat(a, b, c, d, 0);
  fs::create_directories(path);
  files.rename(a, b);  // rmdir(path)
  files_.remove(a);
  is_link(files, a);
}
"""
        found = self.findings({"modicum/io/output.cc": text})
        self.assertEqual([int(line.split(":")[1]) for line in found], [*range(2, 15)])
        self.assertIn("::unlink may follow a link", found[0])
        self.accepts({"modicum/io/posix_file.cc": text, "modicum/io/output_test.cc": text})

    def test_python_that_changes_files(self) -> None:
        text = """\
class Error(Exception): ...
os.remove(path)
os.replace(a, b)
shutil.rmtree(path)
from shutil import copytree
path.unlink(missing_ok=True)
path.rename(to)
path.replace(to)
os.makedirs(path)
os.symlink(a, b)
path.mkdir()
path.hardlink_to(to)
name.replace("a", "b"), name.replace(*both), dataclasses.replace(ask, step=1)
_modicum.rename(a, b), os.path.join(a, b), os.readlink(a)
"""
        found = self.findings({"modicum/python/modicum/errors.py": text})
        self.assertEqual(sorted(int(line.split(":")[1]) for line in found), [*range(2, 13)])
        self.accepts({"tests/test_ranks.py": GOOD["tests/test_ranks.py"] + text})


class Names(Check):
    def test_a_word_that_is_no_identifier(self) -> None:
        path = "modicum/io/posix.cc"
        self.source(path, "\nvoid f(int of) {\n}\n", f"{path}:2: 'of' is no identifier")
        for text in ("int one = 1;", "of_.call();", "{.held = 2};", "x.into(y);"):
            self.source(path, f"{text}\n", "is no identifier: name what it is")

    def test_literals_and_comments_are_free(self) -> None:
        text = """\
// one of its own, as given
const char *a = "one \\" of", *b = R"(how "into" one)", c = 'o';  /* told
made */
int held_bytes = 8'000 + 0x1'0F, state_of = 1;  // the watcher's own
"""
        self.accepts({"modicum/io/posix.cc": text, "scripts/mutants.py": "one = 1\n"})

    def test_a_participle_alone_is_no_type_name(self) -> None:
        path = "modicum/io/posix.cc"
        for text in ("struct Held {};", "class Stored;", "using Found = int;", "enum class Told;"):
            self.source(path, f"{text}\n", "is no type name: use a noun")
        self.accepts({path: "struct HeldShard {};\nTEST(Stored, Tensors);\n"})

    def test_a_type_in_two_headers(self) -> None:
        first = {"modicum/io/file_doubles.h": "struct Page;\nclass alignas(8) Span final {\n};\n"}
        path = "modicum/io/io.h"
        for line in ("struct Span {", "enum class Span : uint8_t { a };"):
            text = f"{GOOD[path]}{line}\n"
            what = "modicum/io/file_doubles.h defines a type Span, too"
            self.refuses(first | {path: text}, f"{path}:2: ", what)
        self.accepts(first | {path: GOOD[path] + "struct Page {};\nclass Span;\n"})


class Table(Check):
    def test_no_table(self) -> None:
        self.page("| room |", "| chamber |", "no table of rooms")

    def test_a_table_that_allows_a_room_on_a_higher_floor(self) -> None:
        self.page("| `base` | 1 | - |", "| `base` | 1 | `io` |", "`io` above it")

    def test_a_cycle_on_one_floor(self) -> None:
        page = PAGE.replace("| `io` | 2 | `base` |", "| `io` | 2 | `base` `kernels` |")
        page = page.replace("| `kernels` | 2 | `base` |", "| `kernels` | 2 | `base` `io` |")
        self.refuses({"docs/ARCHITECTURE.md": page}, "ARCHITECTURE.md", "`io` is in a cycle")

    def test_a_name_that_is_no_room(self) -> None:
        self.page("| `io` | 2 | `base` |", "| `io` | 2 | `base` `attic` |", "which is no room")

    def test_cmake_disagrees_with_the_table(self) -> None:
        for old, new, what in [
            ("stream DEPENDS base io", "stream DEPENDS base", "`stream` lacks io"),
            ("kernels DEPENDS base", "kernels DEPENDS base io", "has io, which the table lacks"),
            ("base io\n             kernels stream", "base io kernels", "`cli` lacks stream"),
            ("modicum_room(base)\n", "# modicum_room(base)\n", "`base` has no modicum_room"),
            ("modicum_room(base)\n", "modicum_room(base)\nmodicum_room(attic)\n", "no room of"),
        ]:
            self.refuses({"CMakeLists.txt": CMAKE.replace(old, new)}, "CMakeLists.txt", what)


class Sizes(Check):
    def test_a_long_function(self) -> None:
        self.accepts({"modicum/io/posix.cc": long_function(70)})
        self.source("modicum/io/posix.cc", long_function(71), "f has 71 lines")
        self.source("modicum/io/posix.h", long_function(71, "inline int f()"), "f has 71 lines")

    def test_a_long_test(self) -> None:
        self.accepts({"modicum/io/posix_test.cc": long_function(120, "TEST(File, Reads)")})
        self.source(
            "modicum/io/posix_test.cc", long_function(121, "TEST(File, Reads)"), "121 lines"
        )

    def test_a_long_python_function(self) -> None:
        text = "def f():\n" + "    g()\n" * 70
        self.source("scripts/tool.py", text, "f has 71 lines")

    def test_a_long_file(self) -> None:
        self.accepts({"modicum/io/posix.cc": "//\n" * 500})
        self.source("modicum/io/posix.cc", "//\n" * 501, "501 lines")

    def test_kernels_and_tests_may_be_longer(self) -> None:
        for path in ["modicum/kernels/cast.cc", "modicum/io/io_test.cc", "tests/test_load.py"]:
            comment = "#\n" if path.endswith(".py") else "//\n"
            self.accepts({path: comment * 800})
            self.source(path, comment * 801, "801 lines")

    def test_a_product_of_sizes(self) -> None:
        for product in ("ranks * numel_of(shape)", "part_bytes * ranks", "m.data_bytes() * 2"):
            text = f"uint64_t x = {product};\n"
            self.source("modicum/stream/load.cc", text, "an unchecked product")
            self.accepts({"modicum/kernels/cast.cc": text, "modicum/stream/step_test.cc": text})
        for fine in ("saturating_mul(part_bytes, ranks)", "rows * columns  // part_bytes * 2"):
            self.accepts({"modicum/stream/load.cc": f"x = {fine};\n"})

    def test_a_mutant_whose_text_is_not_there_once(self) -> None:
        source = {"modicum/io/posix.cc": "int a = 1;\nint b = 1;\n"}
        mutant = '[[mutant]]\nname = "m"\nfile = "modicum/io/posix.cc"\nfind = "{}"\n'
        path = "mutants/io.toml"
        self.accepts(source | {path: mutant.format("int a = 1;")})
        self.refuses(source | {path: mutant.format("= 1;")}, f"{path}:1", "occurs 2 times")
        self.refuses(source | {path: mutant.format("int c")}, f"{path}:1", "occurs 0 times")
        elsewhere = {"mutants/ranks.toml": mutant.format("int a = 1;")}
        self.refuses(source | elsewhere, "mutants/ranks.toml:1", "must be in mutants/io*.toml")

    def test_a_wide_line(self) -> None:
        self.accepts({"modicum/io/posix.cc": "//" + "x" * 98 + "\n"})
        self.source("modicum/io/posix.cc", "//" + "x" * 99 + "\n", "101 columns")

    def test_columns_are_characters(self) -> None:
        self.accepts({"modicum/io/posix.cc": "//" + "\u00e9" * 98 + "\n"})

    def test_an_open_task_needs_its_issue(self) -> None:
        word = "TO" + "DO"
        self.accepts({"modicum/io/posix.cc": f"// {word}(#12): more\n"})
        self.source("modicum/io/posix.cc", f"// {word}: more\n", "issue number")
        self.source("scripts/run.sh", f"# {word}(me): more\n", "issue number")


class Parameters(Check):
    def test_a_function_with_six(self) -> None:
        for source in (f"void g({SIX}) {{\n}}\n", f"struct S {{\n  S({SIX}) {{\n  }}\n}};\n"):
            self.source("modicum/io/posix.cc", source, "has 6 parameters")
            self.accepts({"modicum/python/loading.cc": source})

    def test_commas_in_inner_brackets_do_not_count(self) -> None:
        inner = "std::map<int, int> a, void (*b)(int, int), int c = f(1, 2), int d = {}, int e = 0"
        self.accepts({"modicum/io/posix.cc": f"void g({inner}) {{\n}}\nvoid h() {{\n}}\n"})

    def test_a_python_function_with_six(self) -> None:
        path = "scripts/mutants.py"
        self.source(path, "def f(a, b, c, d, e, f): ...\n", "f has 6 parameters")
        self.accepts({path: "class C:\n    def f(self, a, b, c, d, e): ...\n"})
        method = "class C:\n    def __init__(self, a, b, c, d, e, f): ...\n"
        self.source(path, method, "C.__init__ has 6")

    def test_keyword_only_ones_count_for_private_functions(self) -> None:
        path = "scripts/mutants.py"
        self.accepts({path: "def f(a, *, b, c, d, e, f): ...\n"})
        self.source(path, "def _f(a, *, b, c, d, e, f): ...\n", "_f has 6 parameters")

    def test_parameters_of_tests_do_not_count(self) -> None:
        self.accepts({"tests/test_more.py": "def test_it(a, b, c, d, e, f): ...\n"})
        self.source("tests/test_more.py", "def it(a, b, c, d, e, f): ...\n", "it has 6")

    def test_an_exception_is_listed_and_needed(self) -> None:
        page = {"CONTRIBUTING.md": MORE_PARAMETERS}
        both = f"void old({SIX}) {{\n  auto f = []({SIX}) {{\n  }};\n}}\n"
        self.accepts(page | {"modicum/io/posix.cc": both})
        self.refuses(page, "CONTRIBUTING.md", "`a lambda` of `io` needs no exception")
        self.refuses(page | {"modicum/base/sizes.cc": both}, "sizes.cc", "has 6 parameters")


class Unused(Check):
    def test_a_header_that_nobody_includes(self) -> None:
        path = "modicum/io/posix.h"
        self.source(path, "#pragma once\n", "nothing uses")
        self.source(path, f'#include "{path}"\n', "nothing uses")
        self.accepts({path: "", "modicum/io/posix.cc": f'#include "{path}"\n'})

    def test_a_module_of_the_package_is_imported(self) -> None:
        path, user = "modicum/python/modicum/memory/nvml.py", "modicum/python/modicum/errors.py"
        self.source(path, "", "nothing uses")
        self.refuses({path: "", "Makefile": "scripts/run.sh nvml.py\n"}, path, "nothing uses")
        self.accepts({path: "", user: "from modicum.memory import nvml\n"})
        self.accepts({path: "", user: "from modicum.memory.nvml import used\n"})

    def test_other_modules_are_imported_or_named(self) -> None:
        path = "benchmarks/rivals/rank.py"
        self.source(path, "", "nothing uses")
        for text in ("import rivals.rank", "'rivals.rank'", '"rank:main"', "'rank.py'"):
            self.accepts({path: "", "tests/test_rank.py": text})

    def test_scripts_and_data_are_named(self) -> None:
        for path in ("scripts/more.sh", "tests/golden/more.txt", "cmake/more.cmake"):
            self.source(path, "", "nothing uses")
            self.accepts({path: "", "docs/page.md": f"See `{path}`.\n"})

    def test_some_files_are_found_by_their_place(self) -> None:
        for path in ("examples/more.py", "tests/conftest.py", ".ci/run", "docs/more.md"):
            self.accepts({path: ""})


class Pages(Check):
    def readme(self, text: str, what: str) -> None:
        self.refuses({"README.md": README + text}, "README.md:", what)

    def test_a_link_to_a_file_that_does_not_exist(self) -> None:
        self.readme("[gone](docs/gone.md)\n", "the link docs/gone.md leads nowhere")
        self.refuses({"docs/more.md": "![a](README.md)\n"}, "docs/more.md:1", "leads nowhere")
        self.accepts({"docs/more.md": "[up](../README.md), [web](https://example.org/x)\n"})
        self.accepts({"docs/more.md": "`[code](gone.md)`, [folder](../modicum), [title](.. 'a')\n"})
        for text in (
            "[title](gone.md 'its title')", "[a]: gone.md", "<img src='gone.png'>",
            '<a href="gone.md">a</a>', "[text\n](gone.md)", "[outside](../../tmp)", "[up](../..)",
        ):  # fmt: skip
            self.refuses({"docs/more.md": f"{text}\n"}, "docs/more.md:", "leads nowhere")
        self.refuses({"README.zh.md": "[a](docs/gone.md)\n"}, "README.zh.md:1", "leads nowhere")

    def test_a_link_to_a_heading_that_does_not_exist(self) -> None:
        self.readme("[gone](#how-it-worked)\n", "no such heading")
        self.readme("[gone](docs/reference/command-line.md#save)\n", "no such heading")
        self.readme("[folder](docs#more)\n", "no such heading")
        self.readme("[two](#how-it-works-1)\n", "no such heading")
        twice = "## How it works\n## [A `b`](docs/ARCHITECTURE.md)\n[](#how-it-works-1), [](#a-b)\n"
        self.accepts({"README.md": README + twice})

    def test_a_path_that_does_not_exist(self) -> None:
        for path in ("docs/gone.md", "tests/*.toml", "modicum/attic", "examples/gone.py"):
            self.readme(f"See `{path}`.\n", f"{path} does not exist")
            self.readme(f"    python {path}\n", f"{path} does not exist")
        self.readme("See `gone.cc`.\n", "no file is called gone.cc")

    def test_a_page_that_a_source_cites(self) -> None:
        self.source("modicum/io/posix.cc", "// docs/gone.md\n", "docs/gone.md does not exist")
        self.accepts({"modicum/io/posix.cc": "// docs/ARCHITECTURE.md\n"})

    def test_a_flag_that_no_program_has(self) -> None:
        self.readme("Use `--gone`.\n", "no flag --gone")
        self.readme("Use `modicum plan DIR --gone`.\n", "no flag --gone")
        self.readme("    modicum load DIR --gone 8\n", "no flag --gone")

    def test_a_flag_of_another_verb_or_program(self) -> None:
        self.readme("Use `modicum step --ranks 8`.\n", "no flag --ranks")
        self.readme("```sh\npython examples/train.py --quiet\n```\n", "no flag --quiet")
        self.accepts({"README.md": README + "Use `modicum step -q --quiet` and `--ranks`.\n"})

    def test_a_flag_that_only_the_page_of_the_command_line_has(self) -> None:
        page = COMMAND_LINE + "| `--gone` | in no source |\n"
        path = "docs/reference/command-line.md"
        self.refuses({path: page}, f"{path}:12", "no flag --gone")

    def test_released_parts_of_the_changelog_may_name_the_past(self) -> None:
        text = "# Changelog\n\n## [Unreleased]\n\n{}\n\n## [0.1.0]\n\n- `docs/gone.md`, `--gone`\n"
        self.accepts({"CHANGELOG.md": text.format("- none")})
        self.refuses({"CHANGELOG.md": text.format("- `--gone`")}, "CHANGELOG.md:5", "--gone")


if __name__ == "__main__":
    unittest.main()
