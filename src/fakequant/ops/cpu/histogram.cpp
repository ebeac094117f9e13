// The range of a tensor and the counts of its magnitudes, in one pass over memory.
//
// Positions are found for a chunk at a time by vector code, and then counted. Four tables take turns, because the
// processor waits for a number that it has just written: values that are often equal, as the zeros of a ReLU, would
// cost five times as much.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "chunks.h"
#include "convert.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

constexpr int64_t kTables = 4;
constexpr int64_t kPart = 64 * kChunk;  // of a group: the least that a thread takes

// A number as an integer of the same order: minima and maxima of integers vectorise, and NaN, which has no place among
// floats, comes beyond an infinity.
template <typename C>
struct Ordered {
  using Int = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>;
  static constexpr Int kMagnitude = std::numeric_limits<Int>::max();
  static Int of(C value) { return flip(std::bit_cast<Int>(value)); }
  static C number(Int key) { return std::bit_cast<C>(flip(key)); }
  // Of a negative number all bits but the sign; its own inverse.
  static FAKEQUANT_INLINE Int flip(Int bits) { return bits ^ ((bits >> (8 * sizeof(C) - 1)) & kMagnitude); }
};

template <typename C>
struct Extent {
  using Int = typename Ordered<C>::Int;
  Int lo = std::numeric_limits<Int>::max();
  Int hi = std::numeric_limits<Int>::min();

  void join(const Extent& other) {
    lo = std::min(lo, other.lo);
    hi = std::max(hi, other.hi);
  }
  bool finite() const {
    constexpr C kInfinity = std::numeric_limits<C>::infinity();
    return lo > Ordered<C>::of(-kInfinity) && hi < Ordered<C>::of(kInfinity);
  }
};

template <typename C>
FAKEQUANT_INLINE Extent<C> extent_of(const C* x, int64_t n) {
  using Int = typename Ordered<C>::Int;
  Int lo = std::numeric_limits<Int>::max(), hi = std::numeric_limits<Int>::min();
  for (int64_t i = 0; i < n; ++i) {
    Int bits;
    std::memcpy(&bits, x + i, sizeof(C));
    const Int key = Ordered<C>::flip(bits);
    lo = key < lo ? key : lo;
    hi = key > hi ? key : hi;
  }
  return {lo, hi};
}
FAKEQUANT_CLONES Extent<float> extent(const float* x, int64_t n) { return extent_of(x, n); }
FAKEQUANT_CLONES Extent<double> extent(const double* x, int64_t n) { return extent_of(x, n); }

// The bin of every magnitude, behind those of the other sign for what is not negative. What lies beyond the last bin,
// or is no number, goes there: such counts are not used.
template <typename C>
FAKEQUANT_INLINE void positions_of(const C* x, int32_t* position, int64_t n, C inverse, int32_t bins) {
  const C last = static_cast<C>(bins - 1);
  for (int64_t i = 0; i < n; ++i) {
    const C bin = std::abs(x[i]) * inverse;
    position[i] = static_cast<int32_t>(bin < last ? bin : last) + (x[i] < C(0) ? 0 : bins);
  }
}
FAKEQUANT_CLONES void positions(const float* x, int32_t* position, int64_t n, float inverse, int32_t bins) {
  positions_of(x, position, n, inverse, bins);
}
FAKEQUANT_CLONES void positions(const double* x, int32_t* position, int64_t n, double inverse, int32_t bins) {
  positions_of(x, position, n, inverse, bins);
}

FAKEQUANT_CLONES void add_tables(const uint32_t* tables, int64_t* counts, int64_t length) {
  for (int64_t i = 0; i < length; ++i) {
    int64_t sum = 0;
    for (int64_t table = 0; table < kTables; ++table) sum += tables[table * length + i];
    counts[i] += sum;
  }
}

// Counts of one group: in tables that take turns, or where so few values come that clearing them would cost more, in
// place.
struct Counts {
  int64_t* line;  // 2 * bins; null where nothing is to be counted
  uint32_t* tables;  // enough for 2**34 values, a quarter in each
  int32_t bins;

  void add(const int32_t* position, int64_t n) const {
    if (tables == nullptr) {
      for (int64_t i = 0; i < n; ++i) ++line[position[i]];
      return;
    }
    const int64_t length = 2 * bins;
    int64_t i = 0;
    for (; i + kTables <= n; i += kTables)
      for (int64_t table = 0; table < kTables; ++table) ++tables[table * length + position[i + table]];
    for (; i < n; ++i) ++tables[position[i]];
  }
};

template <typename T, typename C>
Extent<C> observe_part(const T* x, int64_t n, C inverse, const Counts& counts) {
  alignas(64) C converted[kChunk];
  alignas(64) int32_t position[kChunk];
  Extent<C> found;
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t length = std::min(kChunk, n - first);
    const C* values;
    if constexpr (std::is_same_v<T, C>) {
      values = x + first;
    } else {
      load(x + first, converted, length);
      values = converted;
    }
    found.join(extent(values, length));
    if (counts.line == nullptr) continue;
    positions(values, position, length, inverse, counts.bins);
    counts.add(position, length);
  }
  return found;
}

template <typename T, typename C>
void observe_all(const Tensor& values, const Tensor& inverse, Tensor& range, int64_t* counts, int64_t bins) {
  const int64_t groups = values.size(0), elements = values.size(1), line = 2 * bins;
  const int64_t parts = (elements + kPart - 1) / kPart;
  const T* x = static_cast<const T*>(values.data_ptr());
  const C* inverses = static_cast<const C*>(inverse.data_ptr());
  C* lo = static_cast<C*>(range.data_ptr());
  const bool in_tables = counts != nullptr && (parts > 1 || elements > kTables * line);
  std::vector<Extent<C>> found(groups);
  std::mutex joining;
  const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / std::max<int64_t>(1, std::min(elements, kPart)));
  torch::stable::parallel_for(0, groups * parts, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> tables(in_tables ? kTables * line : 0);
    for (int64_t part = begin; part < end;) {
      const int64_t group = part / parts, last = std::min(end, (group + 1) * parts);
      Counts into{counts == nullptr ? nullptr : counts + group * line, in_tables ? tables.data() : nullptr,
                  static_cast<int32_t>(bins)};
      const int64_t first = (part - group * parts) * kPart;
      const int64_t n = std::min((last - group * parts) * kPart, elements) - first;
      const Extent<C> extent = observe_part(x + group * elements + first, n, inverses[group], into);
      part = last;
      if (!in_tables && parts == 1) {
        found[group] = extent;
        continue;
      }
      const std::lock_guard<std::mutex> guard(joining);
      found[group].join(extent);
      if (!in_tables) continue;
      add_tables(tables.data(), into.line, line);
      std::fill(tables.begin(), tables.end(), 0u);
    }
  });
  for (int64_t group = 0; group < groups; ++group) {
    const Extent<C>& extent = found[group];
    const C nan = std::numeric_limits<C>::quiet_NaN();
    lo[group] = extent.finite() ? Ordered<C>::number(extent.lo) : nan;
    lo[groups + group] = extent.finite() ? Ordered<C>::number(extent.hi) : nan;
  }
}

// The lowest and highest value of every group [2, groups], NaN where one is not finite; and, if counts [groups, 2, bins]
// are given, the counts of |x| * inverse are added to them: those of negative x first.
void observe(const Tensor values, const Tensor inverse, Tensor range, std::optional<Tensor> counts) {
  STD_TORCH_CHECK(values.dim() == 2 && values.is_contiguous() && inverse.is_contiguous() && range.is_contiguous() &&
                      inverse.numel() == values.size(0) && range.numel() == 2 * values.size(0),
                  "fakequant_cpu: values [groups, elements], inverse [groups] and range [2, groups], without gaps");
  int64_t bins = 0;
  if (counts.has_value()) {
    STD_TORCH_CHECK(counts->dim() == 3 && counts->is_contiguous() && counts->size(0) == values.size(0) &&
                        counts->size(1) == 2 && counts->scalar_type() == torch::headeronly::ScalarType::Long,
                    "fakequant_cpu: counts are int64 [groups, 2, bins], without gaps");
    bins = counts->size(2);
  }
  int64_t* added = counts.has_value() ? static_cast<int64_t*>(counts->data_ptr()) : nullptr;
  with_float_type(values, [&](auto element, auto computed) {
    observe_all<decltype(element), decltype(computed)>(values, inverse, range, added, bins);
  });
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("observe(Tensor values, Tensor inverse, Tensor(a!) range, Tensor(b!)? counts) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("observe", TORCH_BOX(&fakequant::observe)); }
