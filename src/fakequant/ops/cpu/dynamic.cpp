// Fake quantization by the range of the tensor itself, and the measurement of ranges.
//
// Groups that are short runs of memory, tiles [runs, length, 1, 1], are measured and quantized while they are in the
// cache, so that memory is read once and written once. All other tiles, and scales that depend on the whole tensor, are
// measured first. The bits are those of numerics/qparams.py and numerics/reference.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "call.h"
#include "chunks.h"
#include "convert.h"
#include "ranges.h"
#include "scales.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

constexpr int64_t kGrain = kGrainChunks * kChunk;
constexpr int64_t kLongRun = kGrain;  // longer runs are measured by several threads
constexpr int64_t kMostParts = 64;
constexpr int64_t kPieceElements = 2048;  // a piece and its result, as float32, fill half a first-level cache of 32 KiB
constexpr int64_t kPieceRuns = 512;

// How scales are found and, where x is shifted, offsets.
struct Rules {
  ScaleRule scale;
  std::optional<ScaleRule> offset;
  bool on_lattice() const { return offset || scale.kind == ScaleKind::kExact; }
  bool has_zero_points() const { return offset || scale.kind == ScaleKind::kAsymmetric; }
  bool need_low() const { return has_zero_points() || scale.is_signed; }
  int64_t together() const {
    return std::lcm(std::max<int64_t>(1, scale.together), offset ? std::max<int64_t>(1, offset->together) : 1);
  }
};

FAKEQUANT_CLONES void choose_f32(const ScaleRule& rule, const Grid& codes, const float* low, const float* high,
                                 float whole, int64_t n, const Chosen<float>& out) {
  choose_scales(rule, codes, low, high, whole, n, out);
}
FAKEQUANT_CLONES void choose_lattice_f32(const ScaleRule& rule, const ScaleRule* offset, const float* low,
                                         const float* high, int64_t n, const Chosen<float>& out) {
  choose_on_lattice(rule, offset, low, high, n, out);
}
void choose(const Rules& rules, const Grid& codes, const float* low, const float* high, float whole, int64_t n,
            const Chosen<float>& out) {
  const ScaleRule* offset = rules.offset ? &*rules.offset : nullptr;
  if (rules.on_lattice()) return choose_lattice_f32(rules.scale, offset, low, high, n, out);
  choose_f32(rules.scale, codes, low, high, whole, n, out);
}
void choose(const Rules& rules, const Grid& codes, const double* low, const double* high, double whole, int64_t n,
            const Chosen<double>& out) {
  const ScaleRule* offset = rules.offset ? &*rules.offset : nullptr;
  if (rules.on_lattice()) return choose_on_lattice(rules.scale, offset, low, high, n, out);
  choose_scales(rules.scale, codes, low, high, whole, n, out);
}

// Runs of one length, cut into pieces of whole runs that begin at whole bytes of the mask, and of whole blocks of runs
// that are chosen together.
struct Pieces {
  int64_t runs, length, runs_per_piece;
  Pieces(int64_t runs, int64_t length, int64_t elements = kPieceElements, int64_t together = 1)
      : runs(runs), length(length) {
    const int64_t aligned = std::lcm(8 / std::gcd<int64_t>(8, length), together);
    const int64_t fitting = std::clamp<int64_t>(elements / length, 1, kPieceRuns);
    runs_per_piece = (fitting + aligned - 1) / aligned * aligned;
  }
  // Calls `body(first_run, runs)` for every piece.
  template <typename F>
  void for_each(const F& body) const {
    const int64_t pieces = (runs + runs_per_piece - 1) / runs_per_piece;
    const int64_t grain = std::max<int64_t>(1, kGrain / (runs_per_piece * length));
    parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * runs_per_piece; first < std::min(end * runs_per_piece, runs);
           first += runs_per_piece)
        body(first, std::min(runs_per_piece, runs - first));
    });
  }
};

bool is_short_runs(const Tiles& t) { return t.g1 == 1 && t.b1 == 1 && t.b0 <= kLongRun; }

// One part of the rows of one g0 index.
template <typename T, typename I>
void measure_rows(const T* x, const Tiles& t, int64_t rows, I* low, I* high) {
  const int64_t row = t.g1 * t.b1;
  measure_runs(x, t.g1, t.b1, low, high);
  if (rows == 1) return;
  std::vector<I> row_low(low ? t.g1 : 0), row_high(t.g1);
  for (int64_t i = 1; i < rows; ++i) {
    measure_runs(x + i * row, t.g1, t.b1, low ? row_low.data() : nullptr, row_high.data());
    merge_maxima(row_high.data(), high, t.g1);
    if (low) merge_maxima(row_low.data(), low, t.g1);
  }
}

// Groups of several runs: parts of rows are measured, then merged.
template <typename T, typename I>
void measure_in_parts(const T* x, const Tiles& t, I* low, I* high) {
  const int64_t row = t.g1 * t.b1;
  const int64_t rows = std::max((kGrain + row - 1) / row, (t.b0 + kMostParts - 1) / kMostParts);
  const int64_t parts = (t.b0 + rows - 1) / rows;
  const int64_t grain = std::max<int64_t>(1, kGrain / (std::min(rows, t.b0) * row));
  std::vector<I> lows(low ? t.g0 * parts * t.g1 : 0), highs(t.g0 * parts * t.g1);
  parallel_for(0, t.g0 * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * rows;
      measure_rows(x + (i / parts * t.b0 + first) * row, t, std::min(rows, t.b0 - first),
                   low ? lows.data() + i * t.g1 : nullptr, highs.data() + i * t.g1);
    }
  });
  std::fill(high, high + t.g0 * t.g1, I(0));
  if (low) std::fill(low, low + t.g0 * t.g1, I(0));
  for (int64_t i = 0; i < t.g0 * parts; ++i) {
    merge_maxima(highs.data() + i * t.g1, high + i / parts * t.g1, t.g1);
    if (low) merge_maxima(lows.data() + i * t.g1, low + i / parts * t.g1, t.g1);
  }
}

// Runs long enough for several threads: parts are measured, then the parts of each run as a run.
template <typename T, typename I>
void measure_long_runs(const T* x, int64_t runs, int64_t length, I* low, I* high) {
  const int64_t parts = (length + kGrain - 1) / kGrain;
  std::vector<I> lows(low ? runs * parts : 0), highs(runs * parts);
  parallel_for(0, runs * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * kGrain;
      measure_runs(x + i / parts * length + first, 1, std::min(kGrain, length - first),
                   low ? lows.data() + i : nullptr, highs.data() + i);
    }
  });
  if (low) merge_runs<T>(lows, runs, parts, low);
  merge_runs<T>(highs, runs, parts, high);
}

// The magnitudes of the lowest and the highest value of every group; without `low`, the largest magnitudes.
template <typename T, typename I>
void measure_all(const T* x, const Tiles& t, I* low, I* high) {
  if (t.g1 > 1) return measure_in_parts(x, t, low, high);
  if (!is_short_runs(t)) return measure_long_runs(x, t.g0, t.b0 * t.b1, low, high);
  Pieces(t.g0, t.b0).for_each([&](int64_t first, int64_t count) {
    measure_runs(x + first * t.b0, count, t.b0, low ? low + first : nullptr, high + first);
  });
}

// Dividing by a power of two is multiplying by its reciprocal, bit for bit, where that exists: from 2**-127 on.
Arithmetic cheapest(Arithmetic arithmetic, const ScaleRule& rule) {
  const bool exact = rule.kind == ScaleKind::kPowerOfTwo && rule.lowest >= -127;
  return exact && arithmetic == Arithmetic::kDivide ? Arithmetic::kReciprocal : arithmetic;
}

template <typename T, typename C>
struct Job {
  Call<C> call;  // without its parameters
  Rules rules;
  const T* x;
  T* y;
  uint8_t* mask;

  Call<C> with(const Chosen<C>& chosen, const Tiles& tiles) const {
    Call<C> filled = call;
    filled.tiles = tiles;
    filled.params = {chosen.scale, rules.has_zero_points() ? chosen.zero_point : nullptr, chosen.lo, chosen.hi};
    return filled;
  }
};

// Runs of a piece, with the magnitudes that were measured before or, without them, with their own.
template <typename T, typename C>
void quantize_piece(const Job<T, C>& job, const PatternOf<T>* measured, C whole, int64_t first, int64_t count) {
  PatternOf<T> low_bits[kPieceRuns], high_bits[kPieceRuns];
  alignas(64) C low[kPieceRuns], high[kPieceRuns], scale[kPieceRuns], zero_point[kPieceRuns], lo[kPieceRuns],
      hi[kPieceRuns];
  const int64_t length = job.call.tiles.b0, element = first * length;
  if (!measured) {
    const bool need_low = job.rules.need_low();
    measure_runs(job.x + element, count, length, need_low ? low_bits : nullptr, high_bits);
    if (need_low) load_patterns<T>(low_bits, low, count);
  }
  load_patterns<T>(measured ? measured + first : high_bits, high, count);
  const Chosen<C> chosen{scale, zero_point, lo, hi};
  choose(job.rules, job.call.grid, low, high, whole, count, chosen);
  Call<C> call = job.with(chosen, {count, length, 1, 1});
  call.draw.before = element;
  // Memory would wait while a piece is quantized: 4M float32 in MXFP4 took 1.9 times a copy, and take 1.6. What was
  // measured before is read in one go, which processors foresee.
  call.ahead = measured ? 0 : count * length;
  quantize_span(call, job.x + element, job.y + element, bits_from(job.mask, element), 0, count * length);
}

// All parameters are chosen before the first element is quantized.
template <typename T, typename C>
void quantize_measured(const Job<T, C>& job, const std::vector<PatternOf<T>>& low_bits,
                       const std::vector<PatternOf<T>>& high_bits, C whole) {
  const int64_t groups = high_bits.size();
  std::vector<C> low(groups), high(groups), scale(groups), zero_point(groups), lo(groups), hi(groups);
  if (job.rules.need_low()) load_patterns<T>(low_bits.data(), low.data(), groups);
  load_patterns<T>(high_bits.data(), high.data(), groups);
  const Chosen<C> chosen{scale.data(), zero_point.data(), lo.data(), hi.data()};
  choose(job.rules, job.call.grid, low.data(), high.data(), whole, groups, chosen);
  quantize_all(job.with(chosen, job.call.tiles), job.x, job.y, job.mask);
}

// One pass, or two where the scale of the scales needs the largest magnitude of all.
template <typename T, typename C>
void quantize_short_runs(const Job<T, C>& job) {
  using I = PatternOf<T>;
  const int64_t runs = job.call.tiles.g0, length = job.call.tiles.b0;
  const Pieces pieces(runs, length, kPieceElements, job.rules.together());
  if (job.rules.scale.kind != ScaleKind::kUnderAScale)
    return pieces.for_each([&](int64_t first, int64_t count) { quantize_piece<T, C>(job, nullptr, 0, first, count); });
  const auto high = std::make_unique_for_overwrite<I[]>(runs);
  std::atomic<I> largest{0};
  pieces.for_each([&](int64_t first, int64_t count) {
    I most;
    measure_runs(job.x + first * length, count, length, static_cast<I*>(nullptr), &high[first]);
    measure_runs<I>(&high[first], 1, count, Pattern<T>::kInfinity, nullptr, &most);
    for (I known = largest; known < most && !largest.compare_exchange_weak(known, most);) {
    }
  });
  C whole;
  const I most = largest;
  load_patterns<T>(&most, &whole, 1);
  // What this pass reads once need not fit the first cache.
  Pieces(runs, length, 4 * kPieceElements).for_each([&](int64_t first, int64_t count) {
    quantize_piece(job, high.get(), whole, first, count);
  });
}

template <typename T, typename C>
void quantize_by_own_range(const Job<T, C>& job) {
  const Tiles& t = job.call.tiles;
  if (is_short_runs(t) && kPieceRuns % job.rules.together() == 0) return quantize_short_runs(job);
  const int64_t groups = t.g0 * t.g1;
  const bool need_low = job.rules.need_low();
  std::vector<PatternOf<T>> low(need_low ? groups : 0), high(groups);
  measure_all(job.x, t, need_low ? low.data() : nullptr, high.data());
  PatternOf<T> largest;
  merge_runs<T>(high, 1, groups, &largest);
  C whole;
  load_patterns<T>(&largest, &whole, 1);
  quantize_measured(job, low, high, whole);
}

// The fields of ops/kernel_params.py, `ScaleRule`, in their order there.
enum RuleField {
  kKind, kBound, kLimit, kDivisor, kOffset, kUpFrom, kDownAt, kLowest, kHighest, kSmallest, kQuantMin, kQuantMax,
  kMantissaBits, kMinExponent, kNegativeZero, kMost, kKeepsSmall, kIsSigned, kTogether, kSharedSmallest, kSharedMost,
  kSharedQuantMin, kSharedQuantMax, kSharedMantissaBits, kSharedMinExponent, kSharedNegativeZero, kRuleFields
};

ScaleRule rule_of(const double* f, int64_t groups) {
  const auto integer = [f](RuleField field) { return whole(f[field]); };
  ScaleRule rule{};
  rule.kind = static_cast<ScaleKind>(integer(kKind));
  rule.bound = f[kBound], rule.limit = f[kLimit], rule.divisor = f[kDivisor];
  rule.offset = integer(kOffset), rule.up_from = f[kUpFrom], rule.down_at = f[kDownAt];
  rule.lowest = integer(kLowest), rule.highest = integer(kHighest), rule.smallest = f[kSmallest];
  rule.grid.quant_min = f[kQuantMin], rule.grid.quant_max = f[kQuantMax];
  rule.grid.mantissa_bits = integer(kMantissaBits), rule.grid.min_exponent = integer(kMinExponent);
  rule.grid.negative_zero = f[kNegativeZero] != 0;
  check_grid(rule.grid);
  rule.most = f[kMost], rule.keeps_small = f[kKeepsSmall] != 0, rule.is_signed = f[kIsSigned] != 0;
  rule.together = integer(kTogether), rule.shared_smallest = f[kSharedSmallest], rule.shared_most = f[kSharedMost];
  rule.shared.quant_min = f[kSharedQuantMin], rule.shared.quant_max = f[kSharedQuantMax];
  rule.shared.mantissa_bits = integer(kSharedMantissaBits), rule.shared.min_exponent = integer(kSharedMinExponent);
  rule.shared.negative_zero = f[kSharedNegativeZero] != 0;
  check_grid(rule.shared);
  STD_TORCH_CHECK(rule.together >= 0 && (!rule.together || groups % rule.together == 0),
                  "fakequant_cpu: blocks of ", rule.together, " scales do not fill ", groups);
  return rule;
}

// One rule, or two where x is shifted.
Rules rules_of(const Tensor& fields, bool shifted, int64_t groups) {
  const auto* f = data_of<double>(fields, shifted ? 2 * kRuleFields : kRuleFields);
  Rules rules{rule_of(f, groups), std::nullopt};
  if (shifted) rules.offset = rule_of(f + kRuleFields, groups);
  return rules;
}

std::tuple<Tensor, std::optional<Tensor>> fake_quantize_dynamic(const Tensor& x, const Tensor& rule, const Tensor& form,
                                                                int64_t mask_kind,
                                                                const std::optional<Tensor>& random) {
  check_dense(x);
  Tensor y = made_like(x);
  std::optional<Tensor> mask = made_mask(x, mask_kind);
  if (x.numel() == 0) return {y, mask};
  const WithSubnormals mode;  // scales are chosen on this thread
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    Call<C> call = call_of<C>(form, x.numel(), mask_kind, random);
    const Rules rules = rules_of(rule, call.shifted, call.tiles.groups());
    call.arithmetic = cheapest(call.arithmetic, rules.scale);
    quantize_by_own_range(Job<T, C>{call, rules, static_cast<const T*>(x.data_ptr()),
                                    static_cast<T*>(y.data_ptr()),
                                    mask.has_value() ? static_cast<uint8_t*>(mask->data_ptr()) : nullptr});
  });
  return {y, mask};
}

void measure(const Tensor& x, Tensor lo, Tensor hi, int64_t g0, int64_t b0, int64_t g1, int64_t b1) {
  const auto number = [](int64_t size) { return static_cast<double>(size); };
  const Tiles tiles = checked_tiles(number(g0), number(b0), number(g1), number(b1), x.numel());
  check_some(tiles);
  const int64_t groups = tiles.groups();
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    std::vector<PatternOf<T>> low(groups), high(groups);
    measure_all(static_cast<const T*>(x.data_ptr()), tiles, low.data(), high.data());
    C *const lowest = data_of<C>(lo, groups), *const highest = data_of<C>(hi, groups);
    load_patterns<T>(low.data(), lowest, groups);
    for (int64_t i = 0; i < groups; ++i) lowest[i] = C(0) - lowest[i];
    load_patterns<T>(high.data(), highest, groups);
  });
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def(
      "fake_quantize_dynamic(Tensor x, Tensor rule, Tensor form, int mask_kind, Tensor? random=None) "
      "-> (Tensor, Tensor?)");
  m.def("measure(Tensor x, Tensor(a!) lo, Tensor(b!) hi, int g0, int b0, int g1, int b1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("fake_quantize_dynamic", TORCH_BOX(&fakequant::fake_quantize_dynamic));
  m.impl("measure", TORCH_BOX(&fakequant::measure));
}
