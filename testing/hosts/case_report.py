"""Runs the cases of a Python test as Bazel wants it: its filter, and a report of every case."""

import os
import sys
import unittest
import xml.etree.ElementTree as ElementTree
from fnmatch import fnmatchcase


def _cases(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _cases(item)
        else:
            yield item


def _full_name(case):
    return f"{type(case).__name__}.{case.id().rsplit('.', 1)[-1]}"


def _write(path, cases, result):
    problems = {c.id(): ("failure", text) for c, text in result.failures + result.errors}
    problems.update({c.id(): ("skipped", reason) for c, reason in result.skipped})
    suite = ElementTree.Element("testsuite", name="python", tests=str(len(cases)))
    for case in cases:
        suite_name, name = _full_name(case).split(".")
        element = ElementTree.SubElement(suite, "testcase", classname=suite_name, name=name)
        kind, text = problems.pop(case.id(), (None, None))
        if kind:
            ElementTree.SubElement(element, kind, message=text)
    # What belongs to no case: a class that could not be set up.
    for name, (_, text) in problems.items():
        element = ElementTree.SubElement(suite, "testcase", name=name)
        ElementTree.SubElement(element, "failure", message=text)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def main(module="__main__"):
    """In place of unittest.main(). TESTBRIDGE_TEST_ONLY: a pattern like *Name*."""
    pattern = os.environ.get("TESTBRIDGE_TEST_ONLY") or "*"
    loaded = unittest.defaultTestLoader.loadTestsFromModule(sys.modules[module])
    cases = [case for case in _cases(loaded) if fnmatchcase(_full_name(case), pattern)]
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2)
    result = runner.run(unittest.TestSuite(cases))
    if "XML_OUTPUT_FILE" in os.environ:
        _write(os.environ["XML_OUTPUT_FILE"], cases, result)
    sys.exit(0 if result.wasSuccessful() else 1)
