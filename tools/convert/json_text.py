"""Formats JSON exactly as nlohmann-json does, because the manifest's checksum covers its text."""

import json
import math
from fractions import Fraction

FIRST_POWER, LAST_POWER, STEP = -300, 324, 8


def power_of_ten(k):
    """(f, e) with f * 2**e the closest to 10**k, f of 64 bits."""
    value = Fraction(10) ** k
    e = value.numerator.bit_length() - value.denominator.bit_length() - 64
    while value / Fraction(2) ** e >= 2**64:
        e += 1
    while value / Fraction(2) ** e < 2**63:
        e -= 1
    f = math.floor(value / Fraction(2) ** e + Fraction(1, 2))
    return (f, e) if f < 2**64 else (f // 2, e + 1)


POWERS = {k: power_of_ten(k) for k in range(FIRST_POWER, LAST_POWER + 1, STEP)}


def times(x, y):
    return (x[0] * y[0] + 2**63 >> 64, x[1] + y[1] + 64)


def grisu2(number):
    """(digits, exponent) of a positive double: number = digits * 10**exponent, nearly always in the fewest digits."""
    mantissa, e = math.frexp(number)
    f, e = int(mantissa * 2**53), e - 53
    if e < -1074:
        f, e = f >> (-1074 - e), -1074
    plus = (2 * f + 1, e - 1)
    minus = (4 * f - 1, e - 2) if f == 2**52 and e > -1074 else (2 * f - 1, e - 1)
    shift = 64 - plus[0].bit_length()
    plus = (plus[0] << shift, plus[1] - shift)
    minus = (minus[0] << minus[1] - plus[1], plus[1])
    shift = 64 - f.bit_length()
    value = (f << shift, e - shift)

    distance = -60 - plus[1] - 1
    k = int(distance * 78913 / 2**18) + (distance > 0)
    k = FIRST_POWER + STEP * ((-FIRST_POWER + k + STEP - 1) // STEP)
    low, middle, high = (times(each, POWERS[k]) for each in (minus, value, plus))
    low, high = low[0] + 1, (high[0] - 1, high[1])
    delta, distance, exponent = high[0] - low, high[0] - middle[0], -k

    bits = -high[1]
    whole, rest = high[0] >> bits, high[0] & (1 << bits) - 1
    digits = []
    for n in reversed(range(len(str(whole)))):
        digits.append(whole // 10**n)
        whole %= 10**n
        left = (whole << bits) + rest
        if left <= delta:
            return rounded(digits, distance, delta, left, 10**n << bits), exponent + n
    while True:
        rest *= 10
        digits.append(rest >> bits)
        rest &= (1 << bits) - 1
        exponent -= 1
        delta, distance = delta * 10, distance * 10
        if rest <= delta:
            return rounded(digits, distance, delta, rest, 1 << bits), exponent


def rounded(digits, distance, delta, rest, unit):
    while rest < distance and delta - rest >= unit and (rest + unit < distance or distance - rest > rest + unit - distance):
        digits[-1] -= 1
        rest += unit
    return "".join(map(str, digits))


def text_of(number):
    if number == 0 or math.copysign(1, number) < 0:
        return "-" + text_of(-number) if math.copysign(1, number) < 0 else "0.0"
    digits, exponent = grisu2(number)
    point = len(digits) + exponent
    if exponent >= 0 and point <= 15:
        return digits + "0" * exponent + ".0"
    if 0 < point <= 15:
        return digits[:point] + "." + digits[point:]
    if -4 < point <= 0:
        return "0." + "0" * -point + digits
    power = point - 1
    return digits[0] + ("." + digits[1:] if digits[1:] else "") + ("e-" if power < 0 else "e+") + f"{abs(power):02}"


def dumps(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(str(key))}:{dumps(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(dumps, value)) + "]"
    if isinstance(value, float):
        return text_of(value)
    return json.dumps(value, ensure_ascii=False)
