#!/usr/bin/env python3
"""Tests xxh3.py against values of libxxhash."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import xxh3  # noqa: E402  (found beside this file)

DATA = bytes((i * 131 + (i >> 8) * 17) % 256 for i in range(5000))
# By length, from xxh128sum: one for each branch of the algorithm.
KNOWN = {
    0: "99aa06d3014798d86001c324468d497f",
    1: "a6cd5e9392000f6ac44bdff4074eecdb",
    3: "c925ae1797c3998f6811538b444fc6dc",
    4: "6ae518c60df23fcadb9cecd5eb59a7f1",
    8: "63f350efc0ba3e2e5b3f49d0f38f9d7d",
    9: "83c871b1014e6f76d8a20b5b7aa68a37",
    16: "248181305d3c1039adebb1d9d080b69c",
    17: "825a0db7d0afe2c0cfea252f6b7ed7e9",
    33: "d1fad6434c06e9ad17580ff25b93b223",
    65: "188e082b3b260ab511609fe0d1f6230f",
    97: "f26536f5ef52d772a408415b79ba85d8",
    128: "08df79f520370b525cfea347ea4bb687",
    129: "fc1d02037be48a62821740ece8839b64",
    160: "33fe39a6a767b4d34656f5513beed585",
    240: "8406fbd017acdf4e687f00a7f64e46db",
    241: "d894c74b1b3ea28f44dbd3180a664e27",
    1024: "b8c0e3eef73574e67b3d0d5804231abc",
    1025: "75f34330cbddd562863f46356e79e544",
    4999: "f4900165902b02a3c6fdfd64fc87f29c",
}


class Xxh3Test(unittest.TestCase):
    def test_every_branch_has_the_known_value(self):
        for length, expected in KNOWN.items():
            with self.subTest(length=length):
                self.assertEqual(xxh3.xxh3_128_of_python(DATA[:length]), expected)
                self.assertEqual(xxh3.xxh3_128(DATA[:length]), expected)

    def test_every_length_is_as_of_the_library(self):
        if xxh3._LIBRARY is None:
            self.skipTest("no libxxhash")
        for length in [*range(1100), 2047, 2048, 2049, 4096, 5000]:
            piece = DATA[-length:] if length else b""
            self.assertEqual(xxh3.xxh3_128_of_python(piece), xxh3.xxh3_128(piece), length)

    def test_torch_gives_the_same(self):
        try:
            import torch  # noqa: F401  (xxh3 finds it)
        except ImportError:
            self.skipTest("no torch")
        for length in (1025, 4096, 4097, 5000):
            data = bytearray(DATA[:length])
            with_torch = xxh3.xxh3_128_of_python(data)
            hidden = sys.modules.pop("torch")
            without = xxh3.xxh3_128_of_python(data)
            sys.modules["torch"] = hidden
            self.assertEqual(with_torch, without, length)

    def test_bytearrays_and_views(self):
        view = memoryview(bytearray(DATA))[3:300]
        self.assertEqual(xxh3.xxh3_128(view), xxh3.xxh3_128(DATA[3:300]))
        self.assertEqual(xxh3.xxh3_128_of_python(view), xxh3.xxh3_128(DATA[3:300]))


if __name__ == "__main__":
    unittest.main()
