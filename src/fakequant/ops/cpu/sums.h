// Sums that come out the same in any order: numerics/sums.py, which explains the digits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "call.h"

namespace fakequant {
namespace {

constexpr int kDigitBits = 30;
constexpr int kDigits = 4;
constexpr double kBase = 1 << kDigitBits;
constexpr int kLowestPower = -34;  // of the base: that of subnormals
constexpr int64_t kInfinity = 0x7FF0000000000000;
constexpr int64_t kMostAddends = 1 << 22;  // sums of as many digits are exact in float64

// 2**exponent for normal numbers, infinity beyond.
inline double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<int64_t>(std::min(exponent + 1023, 2047)) << 52);
}
// What the values of a group are scaled by, twice, to get their first digit before the point.
inline double halved_scale(int power) { return power_of_two((1 - power) * (kDigitBits / 2)); }

// Adds the digits of n values to `sums` [kDigits] unless one is `limit` or beyond, or NaN: then false.
FAKEQUANT_CLONES bool add_digits(const double* values, int64_t n, double limit, double half, double* sums) {
  constexpr int64_t kLanes = 8;
  double lanes[kDigits][kLanes] = {};
  int64_t below[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) below[lane] = 1;
  const auto add = [&](int64_t i, int64_t lane) FAKEQUANT_INLINE_LAMBDA {
    below[lane] &= std::fabs(values[i]) < limit;
    double rest = values[i] * half * half;
    for (int k = 0; k < kDigits; ++k) {
      const double digit = std::trunc(rest);
      lanes[k][lane] += digit;
      rest = (rest - digit) * kBase;
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  for (int64_t lane = 0; i < n; ++i, ++lane) add(i, lane);
  int64_t all_below = 1;
  for (int64_t lane = 0; lane < kLanes; ++lane) all_below &= below[lane];
  if (!all_below) return false;
  for (int k = 0; k < kDigits; ++k)
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[k] += lanes[k][lane];
  return true;
}

FAKEQUANT_CLONES bool all_below(const double* values, const double* limits, int64_t n) {
  int64_t below = 1;
  for (int64_t i = 0; i < n; ++i) below &= std::fabs(values[i]) < limits[i];
  return below;
}

// One value per group: groups lie side by side in `sums`, digit k of all of them from k * stride on.
FAKEQUANT_CLONES void add_digits_of_row(const double* values, int64_t n, const double* half, double* __restrict sums,
                                        int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    double rest = values[i] * half[i] * half[i];
    for (int k = 0; k < kDigits; ++k) {
      const double digit = std::trunc(rest);
      sums[k * stride + i] += digit;
      rest = (rest - digit) * kBase;
    }
  }
}

// The bits of the largest magnitude; those of inf and NaN are beyond all others.
FAKEQUANT_CLONES int64_t largest_bits(const double* values, int64_t n) {
  int64_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bits = std::bit_cast<int64_t>(values[i]) & std::numeric_limits<int64_t>::max();
    largest = largest > bits ? largest : bits;
  }
  return largest;
}

// Drops the lowest digits for as many positions above the highest.
template <typename D>
void shift_digits(D* digits, int64_t stride, int64_t positions) {
  for (int64_t k = kDigits - 1; k >= 0; --k)
    digits[k * stride] = k < positions ? D(0) : digits[(k - positions) * stride];
}

// Partial sums of consecutive groups, of at most kMostAddends values each.
class Sums {
 public:
  explicit Sums(int64_t groups = 0)
      : groups_(groups),
        power_(groups, kLowestPower),
        limit_(groups, power_of_two(kLowestPower * kDigitBits)),
        half_(groups, halved_scale(kLowestPower)),
        digits_(kDigits * groups),
        not_finite_(groups) {}

  // Values of one group; those that are not finite are set to zero.
  void add(int64_t group, double* values, int64_t n) {
    double sums[kDigits] = {};
    if (power_[group] == kLowestPower || !add_digits(values, n, limit_[group], half_[group], sums)) {
      admit(group, values, n);
      add_digits(values, n, limit_[group], half_[group], sums);
    }
    for (int k = 0; k < kDigits; ++k) digits_[k * groups_ + group] += sums[k];
  }

  // One value for each of n consecutive groups.
  void add_row(int64_t first, double* values, int64_t n) {
    if (!all_below(values, &limit_[first], n))
      for (int64_t i = 0; i < n; ++i)
        if (!(std::fabs(values[i]) < limit_[first + i])) admit_one(first + i, values[i]);
    add_digits_of_row(values, n, &half_[first], &digits_[first], groups_);
  }

  int power(int64_t group) const { return power_[group]; }
  double not_finite(int64_t group) const { return not_finite_[group]; }
  int64_t digit(int64_t group, int k) const { return static_cast<int64_t>(digits_[k * groups_ + group]); }

 private:
  // Makes room for values.
  void admit(int64_t group, double* values, int64_t n) {
    int64_t largest = largest_bits(values, n);
    if (largest >= kInfinity) {
      for (int64_t i = 0; i < n; ++i) set_aside(group, values[i]);
      largest = largest_bits(values, n);
    }
    rise(group, largest);
  }
  void admit_one(int64_t group, double& value) {
    set_aside(group, value);
    rise(group, std::bit_cast<int64_t>(std::fabs(value)));
  }

  void set_aside(int64_t group, double& value) {
    if (std::isfinite(value)) return;
    not_finite_[group] += value;
    value = 0;
  }

  // To the power of the base above a magnitude, of which these are the bits.
  void rise(int64_t group, int64_t largest) {
    const int exponent = static_cast<int>(largest >> 52) - 1022;
    const int power = exponent > 0 ? (exponent + kDigitBits - 1) / kDigitBits : -(-exponent / kDigitBits);
    if (power <= power_[group]) return;
    shift_digits(&digits_[group], groups_, power - power_[group]);
    power_[group] = power;
    limit_[group] = power_of_two(power * kDigitBits);
    half_[group] = halved_scale(power);
  }

  int64_t groups_;
  std::vector<int> power_;
  std::vector<double> limit_, half_, digits_, not_finite_;
};

// The sum of a group of which several `Sums` hold a part.
class Total {
 public:
  void add(const Sums& sums, int64_t group) {
    not_finite_ += sums.not_finite(group);
    if (sums.power(group) > power_) {
      shift_digits(digits_, 1, sums.power(group) - power_);
      power_ = sums.power(group);
    }
    for (int k = 0, lower = power_ - sums.power(group); k + lower < kDigits; ++k)
      digits_[k + lower] += sums.digit(group, k);
  }

  double value() const {
    constexpr int64_t kHalfBase = int64_t(1) << (kDigitBits - 1);
    double number = 0;
    int64_t carry = 0;
    for (int k = kDigits - 1; k > 0; --k) {
      const int64_t digit = digits_[k] + carry;
      carry = (digit + kHalfBase) >> kDigitBits;
      number = (number + static_cast<double>(digit - (carry << kDigitBits))) / kBase;
    }
    const double back = halved_scale(2 - power_);
    return (number + static_cast<double>(digits_[0] + carry)) * back * back + not_finite_;
  }

 private:
  int power_ = kLowestPower;
  int64_t digits_[kDigits] = {};
  double not_finite_ = 0;
};

}  // namespace
}  // namespace fakequant
