"""The value of a tree: exact rationals if possible, then complex numbers of fixed precision, with every cost bounded.

Nothing here depends on the process, the thread or the clock: the bounds count operations and bits, so the verdict on an answer
is the same on every machine. Functions of `mpmath.libmp` take their precision as an argument and share no state.
"""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import comb, factorial, floor
from typing import TypeAlias

from mpmath import libmp  # type: ignore[import-untyped]

from posttrain.rewards.mathematics.tree import Node

PRECISION = 200  # bits of a number that is not exact
AGREE = 140  # leading bits in which two such numbers must agree to be equal
NOISE = 170  # a real or imaginary part this many bits below the number's magnitude counts as 0
EXACT_BITS = 20_000  # bits of an exact number's numerator or denominator
MAGNITUDE = 100_000  # the largest binary exponent of any number
WORK = 20_000  # units of work an answer may cost: 1 for an operation on small numbers, 20 for a function; about 3 microseconds each
LARGEST_FACTORIAL = 1_000

# libmp's complex: (real, imaginary)
Inexact: TypeAlias = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
Value: TypeAlias = Fraction | Inexact


class Undefined(ArithmeticError):
    """There is no value: a division by zero, a logarithm of zero, something that is not a number."""


class Exhausted(ArithmeticError):
    """The value exceeds the bounds on size or work."""


class Meter:
    """Counts work, so that the cost of an answer has a bound that does not depend on the machine."""

    def __init__(self, work: int = WORK):
        self.left = work

    def charge(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise Exhausted("too much work")


def bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _fits(value: Fraction) -> Value:
    return value if bits(value) <= EXACT_BITS else inexact(value)


def _sized(value: Inexact) -> Inexact:
    for _, mantissa, exponent, count in value:
        if not mantissa and exponent:
            raise Undefined("not a finite number")
        if mantissa and abs(exponent + count) > MAGNITUDE:
            raise Exhausted("too large or too small")
    return value


def inexact(value: Value) -> Inexact:
    if isinstance(value, Fraction):
        if abs(value.numerator.bit_length() - value.denominator.bit_length()) > MAGNITUDE:
            raise Exhausted("too large or too small")
        return libmp.from_rational(value.numerator, value.denominator, PRECISION), libmp.fzero
    return value


def is_zero(value: Value) -> bool:
    return value == 0 if isinstance(value, Fraction) else value == (libmp.fzero, libmp.fzero)


def is_real(value: Value) -> bool:
    if isinstance(value, Fraction) or value[1] == libmp.fzero:
        return True
    return value[0] != libmp.fzero and _size(value[1]) < _size(value[0]) - NOISE


def is_positive(value: Value) -> bool:
    return value > 0 if isinstance(value, Fraction) else bool(libmp.mpf_sign(value[0]) > 0)


def _size(part: tuple[int, int, int, int]) -> int:
    return part[2] + part[3] if part[1] else -(10**9)


def equal(left: Value, right: Value) -> bool:
    """Compare exactly if both are exact; else to 140 leading bits in the real and the imaginary part."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    first, second = inexact(left), inexact(right)
    whole = max(_size(part) for part in (*first, *second))
    one_exact = isinstance(left, Fraction) or isinstance(right, Fraction)  # both returned above
    if one_exact and (is_zero(left) or is_zero(right)):
        return whole < -NOISE
    for a, b in zip(first, second, strict=True):
        difference = libmp.mpf_sub(a, b, PRECISION)
        if _size(difference) > max(max(_size(a), _size(b)) - AGREE, whole - NOISE):
            return False
    return True


def add(left: Value, right: Value, meter: Meter, product: bool = False) -> Value:
    """Return the sum, or the product."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        meter.charge(1 + (bits(left) + bits(right)) ** 2 // 2_000_000)
        return _fits(left * right if product else left + right)
    meter.charge(2)
    join = libmp.mpc_mul if product else libmp.mpc_add
    return _sized(join(inexact(left), inexact(right), PRECISION))


def multiply(left: Value, right: Value, meter: Meter) -> Value:
    return add(left, right, meter, product=True)


def divide(left: Value, right: Value, meter: Meter) -> Value:
    if is_zero(right):
        raise Undefined("division by zero")
    if isinstance(right, Fraction):
        return multiply(left, 1 / right, meter)
    meter.charge(3)
    return _sized(libmp.mpc_div(inexact(left), right, PRECISION))


def power(base: Value, exponent: Value, meter: Meter) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        exact = _rational_power(base, exponent, meter)
        if exact is not None:
            return exact
        if base < 0 and exponent.denominator % 2:  # the real root, as taught at school
            value = power(-base, exponent, meter)
            return multiply(Fraction(-1), value, meter) if exponent.numerator % 2 else value
    if is_zero(exponent):
        return Fraction(1)
    if is_zero(base):
        if is_real(exponent) and not libmp.mpf_sign(inexact(exponent)[0]) < 0:
            return Fraction(0)
        raise Undefined("a power of zero")
    meter.charge(40)
    return exponential(multiply(inexact(exponent), logarithm(base, meter), meter), meter)


def _rational_power(base: Fraction, exponent: Fraction, meter: Meter) -> Value | None:
    """Return base^exponent if it is rational and small enough to write down."""
    whole = exponent.numerator
    if base in (0, 1) or whole == 0:
        if base == 0 and whole < 0:
            raise Undefined("division by zero")
        return base if whole else Fraction(1)
    if abs(whole) * max(bits(base) - 1, 1) > EXACT_BITS * max(1, exponent.denominator):
        return None
    if exponent.denominator > 1:
        root = _exact_root(base, exponent.denominator) if exponent.denominator <= 64 else None
        if root is None or abs(whole) * bits(root) > EXACT_BITS:
            return None
        base = root
    meter.charge(1 + abs(whole) * bits(base) // 1_000)
    return base**whole


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """Return the rational root, or None. A negative number has one if the index is odd."""
    if bits(value) > 4_096 or (value < 0 and index % 2 == 0):
        return None
    above = _integer_root(abs(value.numerator), index)
    below = _integer_root(value.denominator, index)
    if above is None or below is None:
        return None
    return Fraction(-above if value < 0 else above, below)


def _integer_root(value: int, index: int) -> int | None:
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**index < value:
            low = middle + 1
        else:
            high = middle
    return low if low**index == value else None


def exponential(value: Value, meter: Meter) -> Value:
    if value == 0:
        return Fraction(1)
    real, imaginary = number = inexact(value)
    if _size(real) > 16 or _size(imaginary) > 64:
        raise Exhausted("too large or too small")
    meter.charge(20)
    return _sized(libmp.mpc_exp(number, PRECISION))


def logarithm(value: Value, meter: Meter) -> Value:
    if is_zero(value):
        raise Undefined("a logarithm of zero")
    if value == 1:
        return Fraction(0)
    meter.charge(20)
    return _sized(libmp.mpc_log(inexact(value), PRECISION))


_NAMES = ("sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
_TRIGONOMETRY = {name: getattr(libmp, f"mpc_{name.replace('arc', 'a')}") for name in _NAMES}
_RECIPROCAL = {"cot": "tan", "sec": "cos", "csc": "sin"}


def apply(name: str, value: Value, base: Value | None, meter: Meter) -> Value:
    """Return a function's value; `base` is that of a logarithm."""
    if name in _RECIPROCAL:
        return divide(Fraction(1), apply(_RECIPROCAL[name], value, None, meter), meter)
    if name in ("log", "ln", "lg"):
        root = base if base is not None else None if name == "ln" else Fraction(10)
        result = logarithm(value, meter)
        return result if root is None else divide(result, logarithm(root, meter), meter)
    if base is not None:
        raise Undefined(f"{name} has no base")
    if name == "exp":
        return exponential(value, meter)
    if name == "abs":
        return _absolute(value, meter)
    if name in ("floor", "ceil"):
        return _rounded(name, value, meter)
    number = inexact(value)
    if max(_size(part) for part in number) > 64:
        raise Exhausted("an angle too large")
    meter.charge(20)
    try:
        return _sized(_TRIGONOMETRY[name](number, PRECISION))
    except (ValueError, ZeroDivisionError):  # a pole
        raise Undefined(f"no value of {name}") from None


def _absolute(value: Value, meter: Meter) -> Value:
    if isinstance(value, Fraction):
        return abs(value)
    meter.charge(3)
    return _sized((libmp.mpc_abs(value, PRECISION), libmp.fzero))


def _rounded(name: str, value: Value, meter: Meter) -> Value:
    meter.charge(3)
    if isinstance(value, Fraction):
        return Fraction(floor(value) if name == "floor" else -floor(-value))
    if not is_real(value) or _size(value[0]) > PRECISION // 2:
        raise Undefined("rounding what is not a real number of moderate size")
    return Fraction(int(libmp.to_int(value[0], "f" if name == "floor" else "c")))


def evaluate(node: Node, point: dict[str, Fraction], meter: Meter) -> Value:
    r"""Return the value of a tree at a point: a number for each symbol, and for the sign of \pm under the name "pm".

    >>> from posttrain.rewards.mathematics.latex import read
    >>> evaluate(read(r"\frac{\sqrt{64}}{3} + x"), {"x": Fraction(1, 3)}, Meter())
    Fraction(3, 1)
    """
    meter.charge(1)
    if node.kind == "number":
        return node.value
    if node.kind == "symbol":
        return point[node.text]
    if node.kind == "constant":
        return _constant(node.text)
    return _combine(node, [evaluate(part, point, meter) for part in node.nodes], point, meter)


def _combine(node: Node, values: list[Value], point: dict[str, Fraction], meter: Meter) -> Value:
    if node.kind in ("add", "multiply"):
        join = add if node.kind == "add" else multiply
        return reduce(lambda total, value: join(total, value, meter), values)
    if node.kind == "divide":
        return divide(values[0], values[1], meter)
    if node.kind in ("negative", "pm", "mp"):
        sign = point.get("pm", Fraction(1)) if node.kind != "negative" else Fraction(-1)
        return multiply(-sign if node.kind == "mp" else sign, values[0], meter)
    if node.kind == "power":
        return power(values[0], values[1], meter)
    if node.kind == "root":
        return power(values[0], divide(Fraction(1), values[1], meter), meter)
    if node.kind == "function":
        return apply(node.text, values[0], values[1] if len(values) > 1 else None, meter)
    if node.kind == "degrees":
        return multiply(values[0], divide(_constant("pi"), Fraction(180), meter), meter)
    if node.kind in ("factorial", "binomial"):
        return _counted(node.kind, values, meter)
    if node.kind == "percent":
        return divide(values[0], Fraction(100), meter)
    raise Undefined(f"a {node.kind} is not a number")


def _counted(kind: str, values: list[Value], meter: Meter) -> Value:
    numbers = []
    for value in values:
        if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
            raise Undefined(f"a {kind} of what is not a whole number")
        if value > LARGEST_FACTORIAL:
            raise Exhausted(f"a {kind} too large")
        numbers.append(int(value))
    meter.charge(100)
    return _fits(Fraction(factorial(*numbers) if kind == "factorial" else comb(*numbers)))


def _constant(name: str) -> Value:
    if name == "i":
        return libmp.fzero, libmp.fone
    if name == "inf":
        raise Undefined("infinity is not a number")
    return (libmp.mpf_pi if name == "pi" else libmp.mpf_e)(PRECISION), libmp.fzero
