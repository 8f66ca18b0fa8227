#!/usr/bin/env python3
"""Compares the pages of docs/ with the code that they speak of.

    tools/docs_test.py                     # every page
    tools/docs_test.py -k Troubleshooting  # one of them
"""

import ast
import glob
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import oracle  # noqa: E402  (found beside this file)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = ("base", "ddp", "elastic", "launcher", "store", "train")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        return stream.read()


def sources(*suffixes, tests=False):
    """The paths of the library's sources; with `tests`, of its tests instead."""
    found = []
    for folder in FOLDERS + (("testing", "examples", "tools") if tests else ()):
        for suffix in suffixes:
            pattern = os.path.join(ROOT, folder, "**", "*" + suffix)
            found += glob.glob(pattern, recursive=True)
    paths = sorted(os.path.relpath(path, ROOT) for path in found)
    return [p for p in paths if (re.search(r"_test\.(cc|py)$", p) is not None) == tests]


def literals(text):
    """What a source prints: its string literals; those with no value between them are one."""
    parts, end = [], 0
    literal_or_comment = r'"((?:\\.|[^"\\\n])*)"|\'((?:\\.|[^\'\\\n])*)\'|(?://|--)[^\n]*'
    for match in re.finditer(literal_or_comment, text):
        literal = match.group(1) if match.group(1) is not None else match.group(2)
        if literal is None:
            end = match.end()
            continue
        between = re.sub(r"//[^\n]*|--[^\n]*|\s|<<|\.\.|,", "", text[end : match.start()])
        parts.append(("\0" if between else "") + literal)
        end = match.end()
    return re.sub(r"%[ds]", "\0", "".join(parts)).replace('\\"', '"')


def cases_with_ranks():
    """The stem of a test -> case -> why it does not run on the simulated device, or ""."""
    found = {}
    for path in sources("_test.cc", tests=True):
        text = re.sub(r'"\s*\n\s*"', "", read(path))  # a literal on two lines
        none = re.search(r'^NOT_ON_DEVICE\("(.*)"\);', text, re.M)
        for name, options in re.findall(r"RANK_TEST\(\s*\w+,\s*(\w+)(.*?)\)\s*\{", text, re.S):
            reason = none or re.search(r'not_on_device(?: =|=\*/)\s*"(.*?)"', options)
            stem = os.path.basename(path)[: -len("_test.cc")]
            found.setdefault(stem, {})[name] = reason.group(1) if reason else ""
    return found


def in_order(pieces, text):
    place = 0
    for piece in pieces:
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def tables(text):
    """The rows of a page's tables, as lists of cells."""
    for line in text.split("\n"):
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def pytorch():
    """A Python that has the PyTorch of the oracle, or None."""
    given = os.environ.get("DDP_ORACLE_PYTHON")
    python = given or os.path.join(oracle.cache_folder(), "venv", "bin", "python")
    return python if oracle.has_pytorch(python) else None


NO_PYTORCH = f"no PyTorch {oracle.PYTORCH} is installed; tools/test --oracle installs it"


class TroubleshootingTest(unittest.TestCase):
    """docs/troubleshooting.md: each text is one that a source prints."""

    def test_every_text_is_in_one_source(self):
        quoted = re.findall(r"^\*\*(\d+)\.\*\* `(.+)`$", read("docs/troubleshooting.md"), re.M)
        self.assertEqual([int(number) for number, _ in quoted], list(range(1, 21)))
        printed = [literals(read(path)) for path in sources(".cc", ".h", ".lua")]
        for number, text in quoted:
            pieces = [piece for piece in text.split("...") if piece.strip(" :'")]
            with self.subTest(number=number, text=text):
                self.assertTrue(any(in_order(pieces, p) for p in printed), "no source prints this")

    def test_flags_and_variables_exist(self):
        page = read("docs/troubleshooting.md") + read("docs/from-python.md")
        code = "".join(read(path) for path in sources(".cc", ".h", ".lua"))
        for name in set(re.findall(r"\bDDP_[A-Z_]+\b", page)):
            self.assertIn(f'"{name}', code, name)
        for name in set(re.findall(r"`--([a-z][a-z-]+)", page)):
            # ddprun's table, and a gflag of a program.
            spellings = (f'"{name}"', name.replace("-", "_"))
            self.assertTrue(any(spelling in code for spelling in spellings), "--" + name)


class FromPythonTest(unittest.TestCase):
    """docs/from-python.md: its pieces, one after another, are the two programs."""

    def test_the_page_has_every_line(self):
        page = read("docs/from-python.md")
        for language, path in (("python", "train.py"), ("cpp", "train.cc")):
            program = read("examples/from_python/" + path)
            program = re.sub(r"\A(?:(?:#|//)(?!include)[^\n]*\n)+", "", program)
            pieces = re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.DOTALL)
            with self.subTest(program=path):
                self.assertEqual(
                    [line for line in "\n".join(pieces).split("\n") if line],
                    [line for line in program.split("\n") if line],
                )

    def test_the_python_program_runs(self):
        python = pytorch()
        if python is None:
            self.skipTest(NO_PYTORCH)
        program = os.path.join(ROOT, "examples", "from_python", "train.py")
        launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(
                [*launcher, program, os.path.join(folder, "spirals.pt")],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertRegex(ran.stdout, r"epoch 9 accuracy (0\.9[5-9]|1\.0)")


class ParityTest(unittest.TestCase):
    """docs/parity.md: short cells, notes that exist, tests that exist, all of PyTorch's names."""

    @classmethod
    def setUpClass(cls):
        cls.page = read("docs/parity.md")

    def test_a_cell_is_one_line(self):
        long = [cell for row in tables(self.page) for cell in row if len(cell) > 110]
        self.assertEqual(long, [], "put the reasons into a note below the table")

    def test_every_note_belongs_to_one_entry(self):
        notes = re.findall(r"^\[\^([\w-]+)\]: ", self.page, re.M)
        entries = re.findall(r"\[\^([\w-]+)\](?!:)", self.page)
        self.assertEqual(sorted(notes), sorted(entries))

    def test_every_test_exists(self):
        tests = "".join(read(path) for path in sources(".cc", ".py", tests=True))
        tested = " ".join(row[4] for row in tables(self.page) if len(row) == 5)
        tested += " ".join(re.findall(r"\b\w+: [A-Z]\w+(?:, [A-Z]\w+)*", self.page))
        for name in sorted(set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z0-9]\w*)+", tested))):
            with self.subTest(name=name):
                self.assertRegex(tests, rf"\b{name}")

    def test_the_column_of_the_simulated_device_is_right(self):
        cases = cases_with_ranks()
        for row in tables(self.page):
            if len(row) != 5 or row[2] not in ("same", "better", "later", "no place"):
                continue
            with self.subTest(tests=row[4]):
                self.assertEqual(row[3], self.on_device(row[4], cases))

    @staticmethod
    def on_device(tests, cases):
        reasons = []
        for test in tests.replace("`", "").split("; "):
            label, _, names = test.partition(": ")
            of_file = cases.get(re.split("[/:]", label)[-1].removesuffix("_test"), {})
            names = tuple(names.split(", "))
            reasons += [why for case, why in of_file.items() if case.startswith(names)]
        ran = [why for why in reasons if not why]
        return "" if not tests else "no" if not ran else "yes" if ran == reasons else "part"

    def test_every_gap_of_the_simulated_device_is_argued(self):
        section = re.search(r"## On a simulated device\n(.*?)\n## ", self.page, re.S).group(1)
        told = " ".join(section.split())
        for of_file in cases_with_ranks().values():
            for reason in filter(None, of_file.values()):
                self.assertIn(reason, told)

    def test_every_name_of_pytorch_is_there(self):
        python = pytorch()
        if python is None:
            self.skipTest(NO_PYTORCH)
        program = (
            "import inspect; from torch.nn.parallel import DistributedDataParallel as D; "
            "print([*inspect.signature(D).parameters, *(n for n in vars(D) if n[0] != '_')])"
        )
        ran = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
        names = set(ast.literal_eval(ran.stdout)) - {"module", "forward"}
        self.assertEqual({n for n in names if not re.search(rf"`[^`]*\b{n}\b", self.page)}, set())


class OtherPagesTest(unittest.TestCase):
    """What other pages list is what the code has."""

    def test_the_acl_rules_are_those_of_the_code(self):
        code = re.sub(r"//[^\n]*", "", read("store/redis_server/redis_acl.cc"))
        commands = re.search(r"kCommands\[\] =(.*?);", code, re.DOTALL).group(1)
        rules = "".join(re.findall(r'"([^"]*)"', commands)).split()
        page = read("docs/rendezvous-protocol.md")
        shown = re.search(r"^user JOB on .*?^```", page, re.M | re.DOTALL).group(0)
        self.assertEqual(re.findall(r"\+\S+", shown), [*rules, "+eval"])

    def test_every_thread_is_listed(self):
        named = re.compile(
            r"(?:pthread_setname_np\([^;\"]*|PR_SET_NAME, |StartDetachedThread\(|"
            r"(?:TaskThread|FileWriter)::Create\([^;\"]*)\"([\w-]+)\""
        )
        names = {n for path in sources(".cc") for n in named.findall(read(path))}
        self.assertGreater(len(names), 10)
        page = read("docs/threading.md")
        self.assertEqual({name for name in names if f"`{name}`" not in page}, set())

    def test_every_section_of_the_report_is_explained(self):
        sys.path.insert(0, os.path.join(ROOT, "tools", "bench"))
        spec = importlib.util.find_spec("reporting.main")
        with open(spec.origin, encoding="utf-8") as stream:
            sections = re.findall(r'^    "(\w+)": \(', stream.read(), re.M)
        self.assertIn("steps", sections)
        page, methods = read("docs/benchmarks.md"), read("docs/benchmarks/methods.md")
        for name in sections:
            self.assertIn(f"`{name}`", page)
            self.assertRegex(methods, rf"(?m)^## (?:.*, )?{name}\b")


if __name__ == "__main__":
    unittest.main()
