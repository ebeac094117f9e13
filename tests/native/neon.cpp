// Compares the kernels of neon.h with the portable loops, for processors that the tests do not run on: prints how
// many values, codes and bits of masks differ, of how many values.

#include "eight_lanes.cpp"

#include <cstdio>
#include <random>
#include <vector>

namespace fakequant {

bool streams(int64_t) { return false; }
int64_t register_width() { return 8; }

namespace {

struct Format {
  Grid grid;
  bool affine;
};
const Format kFormats[] = {
    {{-128, 127, -1, 0, false, nullptr, 0}, false},   // int8
    {{-8, 7, -1, 0, false, nullptr, 0}, false},       // int4
    {{0, 255, -1, 0, false, nullptr, 0}, true},       // uint8 with zero points
    {{-448, 448, 3, -6, true, nullptr, 0}, false},    // float8_e4m3fn
    {{-6, 6, 1, 0, true, nullptr, 0}, false},         // float4_e2m1fn
    {{-6, 6, 1, 0, false, nullptr, 0}, false},        // the same without a negative zero
};
// The shapes of tiles: one scale, rows, rows of scales, short runs, runs that end within a register.
const Tiles kTiles[] = {{1, 4003, 1, 1}, {7, 571, 1, 1},  {1, 61, 64, 1},
                        {250, 16, 1, 1}, {3, 5, 13, 21}, {1, 9, 40, 11}};

struct Counts {
  int64_t values = 0, codes = 0, bits = 0, of = 0;
};

int64_t differing_bits(const std::vector<uint8_t>& mask, const std::vector<uint8_t>& passes) {
  int64_t count = 0;
  for (size_t i = 0; i < passes.size(); ++i) count += passes[i] != ((mask[i / 8] >> (i % 8)) & 1);
  return count;
}

int64_t differing_values(const std::vector<float>& found, const std::vector<float>& right) {
  int64_t count = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    const bool both_nan = right[i] != right[i] && found[i] != found[i];
    count += !both_nan && std::bit_cast<uint32_t>(right[i]) != std::bit_cast<uint32_t>(found[i]);
  }
  return count;
}

// Every magnitude, ties of a scale and the numbers beside them, zeros, subnormals, infinities and NaN.
std::vector<float> hostile(int64_t n, float scale, std::mt19937& random) {
  std::vector<float> x(n);
  const float special[] = {0.0f, -0.0f, 1e-45f, -1e-40f, INFINITY, -INFINITY, NAN, 3e38f, -3e38f};
  for (int64_t i = 0; i < n; ++i) {
    const float tie = (static_cast<float>(random() % 1200) / 4 - 150) * scale;
    switch (random() % 5) {
      case 0: x[i] = special[random() % 9]; break;
      case 1: x[i] = std::nextafter(tie, random() % 2 ? INFINITY : -INFINITY); break;
      case 2: x[i] = std::bit_cast<float>(static_cast<uint32_t>(random())); break;
      default: x[i] = tie;
    }
  }
  return x;
}

// The code of x before it is brought within the bounds, and without its zero point.
float rounded(const Call<float>& call, float x, const Uniform<float>& p) {
  float y = 0;
  switch (call.arithmetic) {
    case Arithmetic::kDivide: scale_run<Arithmetic::kDivide>(&x, &y, 1, p); break;
    case Arithmetic::kReciprocal: scale_run<Arithmetic::kReciprocal>(&x, &y, 1, p); break;
    case Arithmetic::kMultiplier: scale_run<Arithmetic::kMultiplier>(&x, &y, 1, p); break;
  }
  return call.grid.is_integer() ? IntegerRounding<float>(call.grid).round(y) : FloatRounding<float>(call.grid).round(y);
}

// The value or the code of x, and whether its code was within the bounds.
template <Emit E>
bool expect(const Call<float>& call, float x, const Uniform<float>& p, float* y) {
  const Bounds<float> bounds{static_cast<float>(call.grid.quant_min), static_cast<float>(call.grid.quant_max)};
  uint8_t inside = 1;
  *y = rounded(call, x, p);
  if (call.arithmetic == Arithmetic::kMultiplier)
    finish_run<true, false, true, E>(y, &inside, 1, bounds, p);
  else if (call.grid.is_integer())
    finish_run<false, true, true, E>(y, &inside, 1, bounds, p);
  else
    finish_run<false, false, true, E>(y, &inside, 1, bounds, p);
  return inside;
}

bool expect_passed(const Call<float>& call, float x, const Uniform<float>& p, float* y) {
  if (call.rectified && x < 0) x = 0.0f;
  bool inside = expect<Emit::kValue>(call, x, p, y);
  if (call.mask == Mask::kEverywhere) inside = true;
  if (call.mask == Mask::kInputRange) inside = x >= p.lo && x <= p.hi;
  if (call.mask == Mask::kClip) inside = x > p.lo && x < p.hi;
  return inside && !(call.rectified && x == 0.0f);
}

// What T keeps of numbers.
template <typename T>
std::vector<float> kept_by(const std::vector<float>& numbers) {
  std::vector<T> stored(numbers.size());
  std::vector<float> kept(numbers.size());
  store(numbers.data(), stored.data(), numbers.size());
  load(stored.data(), kept.data(), numbers.size());
  return kept;
}

// Codes with their mask, of x as T holds it, and back.
template <typename Q, typename T>
void compare_codes(const Call<float>& call, const std::vector<T>& from, const std::vector<float>& x,
                   const std::vector<uint8_t>& passes, Counts& counts) {
  const int64_t n = from.size();
  std::vector<uint8_t> codes(n), mask((n + 7) / 8);
  const bool masked = call.mask != Mask::kNone;
  const bool nan = eight_at_once(call, from.data(), codes.data(), masked ? mask.data() : nullptr, 0, n);
  if (masked) counts.bits += differing_bits(mask, passes);
  std::vector<Q> right(n);
  std::vector<float> expected(n), values(n), found(n);
  bool holds_nan = false;
  Cursor at(call.tiles, 0);
  for (int64_t i = 0; i < n; ++i) {
    expect<Emit::kCode>(call, x[i], uniform_of(call.params, at.group), &expected[i]);
    holds_nan |= x[i] != x[i];
    if (++at.within == at.length) at.next_run();
  }
  store(expected.data(), right.data(), n);
  load(right.data(), expected.data(), n);  // without the sign of zeros
  at = Cursor(call.tiles, 0);
  for (int64_t i = 0; i < n; ++i) {
    decode_run(call, &expected[i], &values[i], 1, uniform_of(call.params, at.group));
    if (++at.within == at.length) at.next_run();
  }
  counts.codes += nan != holds_nan;
  for (int64_t i = 0; i < n; ++i) counts.codes += static_cast<uint8_t>(right[i]) != codes[i];
  std::vector<T> decoded(n);
  eight_at_once(call, right.data(), decoded.data(), nullptr, 0, n);
  load(decoded.data(), found.data(), n);
  counts.values += differing_values(found, kept_by<T>(values));
}

// Times a power of two: of few bits, or such that bfloat16 times the reciprocal has another code than the quotient.
float any_scale(std::mt19937& random) {
  const float told_apart[] = {0x1.ccccccp1f, 0x1.924926p1f};
  const uint32_t pick = random() % 512, exponent = random() % 20;
  return std::ldexp(pick % 4 ? 1.0f + static_cast<float>(pick) / 512 : told_apart[pick / 4 % 2],
                    static_cast<int>(exponent) - 14);
}

template <typename T>
void compare(Call<float> call, const Format& format, std::mt19937& random, Counts& counts) {
  const int64_t n = call.tiles.elements(), groups = call.tiles.g0 * call.tiles.g1;
  std::vector<float> scale(groups), zero_point(groups), lo(groups), hi(groups), x(n);
  for (int64_t g = 0; g < groups; ++g) {
    scale[g] = any_scale(random);
    zero_point[g] = static_cast<float>(random() % 256), lo[g] = -90 * scale[g], hi[g] = 70 * scale[g];
  }
  call.params = {scale.data(), format.affine ? zero_point.data() : nullptr, lo.data(), hi.data()};
  const std::vector<float> numbers = hostile(n, scale[0], random);
  std::vector<T> from(n), to(n);
  store(numbers.data(), from.data(), n);
  load(from.data(), x.data(), n);
  std::vector<uint8_t> mask((n + 7) / 8), passes(n);
  eight_at_once(call, from.data(), to.data(), call.mask == Mask::kNone ? nullptr : mask.data(), 0, n);
  std::vector<float> right(n), found(n);
  Cursor at(call.tiles, 0);
  for (int64_t i = 0; i < n; ++i) {
    passes[i] = expect_passed(call, x[i], uniform_of(call.params, at.group), &right[i]);
    if (++at.within == at.length) at.next_run();
  }
  if (call.mask != Mask::kNone) counts.bits += differing_bits(mask, passes);
  load(to.data(), found.data(), n);
  counts.values += differing_values(found, kept_by<T>(right));
  counts.of += n;
  if (call.rectified) return;  // chunks encode behind a ReLU
  if (call.grid.is_integer() && call.grid.quant_min < 0) compare_codes<int8_t>(call, from, x, passes, counts);
  if (call.grid.is_integer() && call.grid.quant_min == 0) compare_codes<uint8_t>(call, from, x, passes, counts);
}

}  // namespace
}  // namespace fakequant

int main() {
  using namespace fakequant;
  std::mt19937 random(1);
  Counts counts;
  for (const Format& format : kFormats)
    for (const Tiles& tiles : kTiles)
      for (int64_t arithmetic = 0; arithmetic < (format.affine ? 2 : 3); ++arithmetic)
        for (int64_t mask = 0; mask < 5; ++mask)
          for (const bool rectified : {false, true}) {
            if (rectified && arithmetic) continue;  // see serves_registers
            const Call<float> call{tiles, format.grid, static_cast<Arithmetic>(arithmetic), rectified,
                                   static_cast<Mask>(mask), {}, {}};
            compare<float>(call, format, random, counts);
            compare<Half>(call, format, random, counts);
            compare<BFloat16>(call, format, random, counts);
          }
  std::printf("%lld values, %lld codes and %lld bits differ of %lld\n", static_cast<long long>(counts.values),
              static_cast<long long>(counts.codes), static_cast<long long>(counts.bits),
              static_cast<long long>(counts.of));
}
