"""XXH3-128, the hash of our checkpoints, for programs that have nothing but Python.

    xxh3_128(data) -> 32 hexadecimal digits, as xxh128sum prints them

The system's libxxhash is used where there is one (gigabytes per second). Otherwise Python computes
the hash itself: with torch some hundred megabytes per second, without it a few.
"""

import ctypes
import ctypes.util
import struct
import sys

_MASK = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MX1, _MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_WORDS = struct.unpack("<24Q", _SECRET)
_STRIPE = 64
_BLOCK_STRIPES = 16  # a stripe moves on by one word of the secret: (192 - 64) / 8
_BLOCK = _STRIPE * _BLOCK_STRIPES


def _u32(data, at=0):
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data, at=0):
    return int.from_bytes(data[at : at + 8], "little")


def _swapped(value, size):
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _avalanche64(h):
    h = ((h ^ (h >> 33)) * _P64_2) & _MASK
    h = ((h ^ (h >> 29)) * _P64_3) & _MASK
    return h ^ (h >> 32)


def _avalanche(h):
    h = ((h ^ (h >> 37)) * _MX1) & _MASK
    return h ^ (h >> 32)


def _fold(a, b):
    product = a * b
    return (product & _MASK) ^ (product >> 64)


def _to_16(data):
    n = len(data)
    if n == 0:
        low = _avalanche64(_u64(_SECRET, 64) ^ _u64(_SECRET, 72))
        return low, _avalanche64(_u64(_SECRET, 80) ^ _u64(_SECRET, 88))
    if n <= 3:
        combined = data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8
        turned = _swapped(combined, 4)
        turned = (turned << 13 | turned >> 19) & _MASK32
        low = _avalanche64(combined ^ _u32(_SECRET, 0) ^ _u32(_SECRET, 4))
        return low, _avalanche64(turned ^ _u32(_SECRET, 8) ^ _u32(_SECRET, 12))
    if n <= 8:
        word = _u32(data) | _u32(data, n - 4) << 32
        product = (word ^ _u64(_SECRET, 16) ^ _u64(_SECRET, 24)) * (_P64_1 + (n << 2))
        low, high = product & _MASK, product >> 64 & _MASK
        high = (high + (low << 1)) & _MASK
        low ^= high >> 3
        low = ((low ^ (low >> 35)) * _MX2) & _MASK
        return low ^ (low >> 28), _avalanche(high)
    first, last = _u64(data), _u64(data, n - 8)
    product = (first ^ last ^ _u64(_SECRET, 32) ^ _u64(_SECRET, 40)) * _P64_1
    low, high = (product + ((n - 1) << 54)) & _MASK, product >> 64
    last ^= _u64(_SECRET, 48) ^ _u64(_SECRET, 56)
    high = (high + last + (last & _MASK32) * (_P32_2 - 1)) & _MASK
    low ^= _swapped(high, 8)
    product = low * _P64_2
    high = ((product >> 64) + high * _P64_2) & _MASK
    return _avalanche(product & _MASK), _avalanche(high)


def _mix16(data, at, secret_at):
    a = _u64(data, at) ^ _u64(_SECRET, secret_at)
    return _fold(a, _u64(data, at + 8) ^ _u64(_SECRET, secret_at + 8))


def _mix32(sums, data, first, second, secret_at):
    low = (sums[0] + _mix16(data, first, secret_at)) & _MASK
    low ^= (_u64(data, second) + _u64(data, second + 8)) & _MASK
    high = (sums[1] + _mix16(data, second, secret_at + 16)) & _MASK
    high ^= (_u64(data, first) + _u64(data, first + 8)) & _MASK
    return low, high


def _to_240(data):
    n = len(data)
    sums = ((n * _P64_1) & _MASK, 0)
    if n <= 128:
        for i in reversed(range((n - 1) // 32)):
            sums = _mix32(sums, data, 16 * (i + 1), n - 16 * (i + 2), 32 * (i + 1))
        sums = _mix32(sums, data, 0, n - 16, 0)
    else:
        for i in range(32, 160, 32):
            sums = _mix32(sums, data, i - 32, i - 16, i - 32)
        sums = (_avalanche(sums[0]), _avalanche(sums[1]))
        for i in range(160, n + 1, 32):
            sums = _mix32(sums, data, i - 32, i - 16, 3 + i - 160)
        # The last one has the secret's words the other way round in sign; with a seed of 0 alike.
        sums = _mix32(sums, data, n - 16, n - 32, 136 - 17 - 16)
    low = (sums[0] + sums[1]) & _MASK
    high = (sums[0] * _P64_1 + sums[1] * _P64_4 + n * _P64_2) & _MASK
    return _avalanche(low), -_avalanche(high) & _MASK


def _stripe_sums(data, stripes):
    """The additions of each block of whole stripes: lists of 8 words, the last may be shorter."""
    blocks = []
    for begin in range(0, stripes, _BLOCK_STRIPES):
        count = min(_BLOCK_STRIPES, stripes - begin)
        words = struct.unpack_from(f"<{8 * count}Q", data, begin * _STRIPE)
        sums = [0] * 8
        for stripe in range(count):
            for lane in range(8):
                word = words[8 * stripe + lane]
                keyed = word ^ _SECRET_WORDS[stripe + lane]
                sums[lane ^ 1] += word
                sums[lane] += (keyed & _MASK32) * (keyed >> 32)
        blocks.append(sums)
    return blocks


def _stripe_sums_of_torch(torch, data, stripes):
    """The same for whole blocks, with torch."""
    secret = torch.tensor([w - (1 << 64) if w >> 63 else w for w in _SECRET_WORDS])
    keys = torch.stack([secret[i : i + 8] for i in range(_BLOCK_STRIPES)])
    words = torch.frombuffer(data, dtype=torch.int64, count=8 * stripes)
    words = words.view(-1, _BLOCK_STRIPES, 8)
    sums = []
    for piece in words.split(4096):
        keyed = piece ^ keys
        products = (keyed & _MASK32) * ((keyed >> 32) & _MASK32)
        swapped = piece.sum(1)[:, [1, 0, 3, 2, 5, 4, 7, 6]]
        sums += (products.sum(1) + swapped).tolist()
    return sums


def _long(data):
    n = len(data)
    acc = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    blocks = (n - 1) // _BLOCK
    stripes = (n - 1) // _STRIPE
    torch = sys.modules.get("torch")
    if torch is not None and blocks > 0 and sys.byteorder == "little":
        whole = _stripe_sums_of_torch(torch, data, blocks * _BLOCK_STRIPES)
    else:
        whole = _stripe_sums(data, blocks * _BLOCK_STRIPES)
    scramble = _SECRET_WORDS[16:]
    for sums in whole:
        for lane in range(8):
            a = (acc[lane] + sums[lane]) & _MASK
            acc[lane] = ((a ^ (a >> 47) ^ scramble[lane]) * _P32_1) & _MASK
    rest = data[blocks * _BLOCK : stripes * _STRIPE]
    for sums in _stripe_sums(rest, len(rest) // _STRIPE):
        acc = [(a + b) & _MASK for a, b in zip(acc, sums)]
    last = struct.unpack_from("<8Q", data, n - _STRIPE)
    for lane in range(8):
        keyed = last[lane] ^ _u64(_SECRET, 192 - 64 - 7 + 8 * lane)
        acc[lane ^ 1] += last[lane]
        acc[lane] += (keyed & _MASK32) * (keyed >> 32)
    acc = [a & _MASK for a in acc]

    def merged(secret_at, start):
        for i in range(4):
            key = _u64(_SECRET, secret_at + 16 * i), _u64(_SECRET, secret_at + 16 * i + 8)
            start += _fold(acc[2 * i] ^ key[0], acc[2 * i + 1] ^ key[1])
        return _avalanche(start & _MASK)

    return merged(11, n * _P64_1 & _MASK), merged(192 - 64 - 11, ~(n * _P64_2) & _MASK)


def xxh3_128_of_python(data):
    """The hash without libxxhash. `data`: bytes, bytearray, or a memoryview of bytes."""
    data = memoryview(data).cast("B")
    if len(data) <= 16:
        low, high = _to_16(data)
    elif len(data) <= 240:
        low, high = _to_240(data)
    else:
        low, high = _long(data)
    return f"{high:016x}{low:016x}"


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def _library():
    for name in ("libxxhash.so.0", ctypes.util.find_library("xxhash")):
        try:
            function = ctypes.CDLL(name).XXH3_128bits if name else None
        except (OSError, AttributeError):
            continue
        if function is not None:
            function.restype = _Hash128
            function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            return function
    return None


_LIBRARY = _library()


def xxh3_128(data):
    """The hash of `data`: bytes, bytearray, or a memoryview of bytes."""
    if _LIBRARY is None:
        return xxh3_128_of_python(data)
    view = memoryview(data).cast("B")
    if view.readonly:
        whole = bytes(view)
        found = _LIBRARY(whole, len(whole))
    else:
        found = _LIBRARY((ctypes.c_char * len(view)).from_buffer(view), len(view))
    return f"{found.high:016x}{found.low:016x}"
