// The range of a tensor and the counts of its magnitudes, in one pass over memory.
//
// Positions are found for a chunk at a time by vector code, and then counted. Four tables take turns, because the
// processor waits for a number that it has just written: values that are often equal would cost five times as much. The
// zeros of a ReLU, which are half of its values, are left out before that where the processor can: 0.6 of the time. The
// tables stay with their thread, all 0 between two calls: new memory of their size costs as much as counting 50,000
// values.

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
#include "positions.h"

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
  // Flips all bits of a negative number except the sign. It is its own inverse.
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

// The bin of every magnitude; bins of numbers that are not negative follow the others. Numbers beyond the last bin, and
// NaN, go into the last bin: such counts are not used.
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

FAKEQUANT_CLONES int32_t zeros_among(const float* x, int64_t n) {
  int32_t zeros = 0;
  for (int64_t i = 0; i < n; ++i) zeros += x[i] == 0.0f;
  return zeros;
}

// The positions of a chunk, without those of its zeros where leaving them out gains time; returns how many.
template <typename C>
int64_t place(const C* x, int32_t* position, int64_t n, C inverse, int32_t bins) {
  if constexpr (std::is_same_v<C, float>) {
    if (4 * zeros_among(x, n) > n) {
      const int64_t placed = place_but_zeros_avx512(x, position, n, inverse, bins);
      if (placed >= 0) return placed;
    }
  }
  positions(x, position, n, inverse, bins);
  return n;
}

// How many bins on either side, from 0 outwards, may have counts.
struct Used {
  int64_t negative, positive;
};

template <typename C>
Used used_by(const Extent<C>& extent, C inverse, int64_t bins) {
  if (!extent.finite()) return {bins, bins};
  const C ends[] = {Ordered<C>::number(extent.lo), Ordered<C>::number(extent.hi)};
  int32_t position[2];
  positions(ends, position, 2, inverse, static_cast<int32_t>(bins));
  return {ends[0] < C(0) ? position[0] + 1 : 0, ends[1] < C(0) ? 0 : position[1] - bins + 1};
}

// Adds tables of some length to counts, from the first entry on, and clears them.
FAKEQUANT_CLONES void move_tables(uint32_t* tables, int64_t length, int64_t* counts, int64_t used) {
  for (int64_t i = 0; i < used; ++i) {
    int64_t sum = 0;
    for (int64_t table = 0; table < kTables; ++table) sum += tables[table * length + i];
    counts[i] += sum;
  }
  for (int64_t table = 0; table < kTables; ++table) std::fill_n(tables + table * length, used, 0u);
}

uint32_t* tables_of_thread(int64_t length) {
  thread_local std::vector<uint32_t> tables;
  if (tables.size() < static_cast<size_t>(kTables * length)) tables.resize(kTables * length);
  return tables.data();
}

// Counts of one group: in tables that take turns, or where so few values come that clearing them would cost more, in
// place.
struct Counts {
  int64_t* line;     // 2 * bins; null where nothing is counted
  uint32_t* tables;  // enough for 2**33 values, about a quarter in each
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
  void add_zeros(int64_t n) const {
    if (tables == nullptr) {
      line[bins] += n;
      return;
    }
    for (int64_t table = 0; table < kTables; ++table)
      tables[table * 2 * bins + bins] += static_cast<uint32_t>((n + table) / kTables);
  }
  void finish(const Used& used) const {
    move_tables(tables, 2 * bins, line, used.negative);
    move_tables(tables + bins, 2 * bins, line + bins, used.positive);
  }
};

template <typename C>
struct Task {
  int64_t groups, elements;
  const double* inverse;  // [groups]
  int64_t* counts;        // [groups, 2, bins], or null
  int64_t bins;
  bool all_or_nothing;  // stops at the first value of a group that has no bin or is not finite

  C inverse_of(int64_t group) const {
    // Finite, because 0.0 has to stay in bin 0.
    return static_cast<C>(std::min<double>(inverse[group], std::numeric_limits<C>::max()));
  }
  bool takes(int64_t group, const Extent<C>& extent) const {
    if (!extent.finite()) return false;
    if (counts == nullptr) return true;
    const C amax = std::max(std::abs(Ordered<C>::number(extent.lo)), std::abs(Ordered<C>::number(extent.hi)));
    const C factor = inverse_of(group);
    return factor > C(0) ? amax * factor < static_cast<C>(bins) : amax == C(0);
  }
};

template <typename T, typename C>
Extent<C> observe_part(const Task<C>& task, int64_t group, const T* x, int64_t n, const Counts& counts) {
  alignas(64) C converted[kChunk];
  alignas(64) int32_t position[kPositions];
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
    const Extent<C> here = extent(values, length);
    found.join(here);
    if (task.all_or_nothing && !task.takes(group, here)) break;
    if (counts.line == nullptr) continue;
    const int64_t placed = place(values, position, length, task.inverse_of(group), counts.bins);
    counts.add(position, placed);
    counts.add_zeros(length - placed);
  }
  return found;
}

template <typename T, typename C>
std::vector<Extent<C>> observe_all(const Task<C>& task, const T* x) {
  const int64_t elements = task.elements, line = 2 * task.bins;
  const int64_t parts = (elements + kPart - 1) / kPart;
  const bool in_tables = task.counts != nullptr && (parts > 1 || elements > line);
  std::vector<Extent<C>> found(task.groups);
  std::mutex joining;
  const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / std::max<int64_t>(1, std::min(elements, kPart)));
  parallel_for(0, task.groups * parts, grain, [&](int64_t begin, int64_t end) {
    uint32_t* tables = in_tables ? tables_of_thread(line) : nullptr;
    for (int64_t part = begin; part < end;) {
      const int64_t group = part / parts, last = std::min(end, (group + 1) * parts);
      const Counts into{task.counts == nullptr ? nullptr : task.counts + group * line, tables,
                        static_cast<int32_t>(task.bins)};
      const int64_t first = (part - group * parts) * kPart;
      const int64_t n = std::min((last - group * parts) * kPart, elements) - first;
      const Extent<C> extent = observe_part(task, group, x + group * elements + first, n, into);
      part = last;
      if (!in_tables && parts == 1) {
        found[group] = extent;
        continue;
      }
      const std::lock_guard<std::mutex> guard(joining);
      found[group].join(extent);
      if (in_tables) into.finish(used_by(extent, task.inverse_of(group), task.bins));
    }
  });
  return found;
}

template <typename C>
Task<C> task_of(const Tensor& values, const Tensor& inverse, const std::optional<Tensor>& counts) {
  using torch::headeronly::ScalarType;
  const int64_t groups = inverse.numel();
  STD_TORCH_CHECK(values.is_contiguous() && groups > 0 && values.numel() % groups == 0,
                  "fakequant_cpu: values [groups, elements] and inverse [groups], without gaps");
  Task<C> task{groups, values.numel() / groups, data_of<double>(inverse, groups), nullptr, 0, false};
  if (!counts.has_value()) return task;
  STD_TORCH_CHECK(counts->dim() == 3 && counts->is_contiguous() && counts->size(0) == groups && counts->size(1) == 2 &&
                      counts->scalar_type() == ScalarType::Long,
                  "fakequant_cpu: counts are int64 [groups, 2, bins], without gaps");
  task.counts = static_cast<int64_t*>(counts->data_ptr());
  task.bins = counts->size(2);
  check_bins(task.bins);
  // A bin below 0 would be counted outside of memory.
  STD_TORCH_CHECK(std::all_of(task.inverse, task.inverse + groups, [](double one) { return one >= 0; }),
                  "fakequant_cpu: inverses of widths are numbers >= 0");
  return task;
}

// The lowest and highest value of every group [2, groups], NaN where one is not finite; and, if counts [groups, 2, bins]
// are given, the counts of |x| * inverse are added to them, negative x first.
void observe(const Tensor values, const Tensor inverse, Tensor range, std::optional<Tensor> counts) {
  with_float_type(values, [&](auto element, auto computed) {
    using C = decltype(computed);
    const Task<C> task = task_of<C>(values, inverse, counts);
    C* ends = data_of<C>(range, 2 * task.groups);
    const std::vector<Extent<C>> found = observe_all(task, static_cast<const decltype(element)*>(values.data_ptr()));
    for (int64_t group = 0; group < task.groups; ++group) {
      const C nan = std::numeric_limits<C>::quiet_NaN();
      ends[group] = found[group].finite() ? Ordered<C>::number(found[group].lo) : nan;
      ends[task.groups + group] = found[group].finite() ? Ordered<C>::number(found[group].hi) : nan;
    }
  });
}

// Widens the ranges lo to hi [groups] to what every group holds and, if counts are given, adds to them; true. Nothing
// happens, and false, where a value is not finite or lies beyond the last bin.
bool take_in(const Tensor values, const Tensor inverse, Tensor lo, Tensor hi, std::optional<Tensor> counts) {
  bool all = true;
  with_float_type(values, [&](auto element, auto computed) {
    using C = decltype(computed);
    Task<C> task = task_of<C>(values, inverse, counts);
    C *const lowest = data_of<C>(lo, task.groups), *const highest = data_of<C>(hi, task.groups);
    int64_t* const total = task.counts;
    std::vector<int64_t> added(2 * task.bins * task.groups);
    if (total != nullptr) task.counts = added.data();
    task.all_or_nothing = true;
    const std::vector<Extent<C>> found = observe_all(task, static_cast<const decltype(element)*>(values.data_ptr()));
    for (int64_t group = 0; group < task.groups; ++group) all &= task.takes(group, found[group]);
    if (!all) return;
    for (int64_t group = 0; group < task.groups; ++group) {
      if (total != nullptr) {
        const Used used = used_by(found[group], task.inverse_of(group), task.bins);
        const int64_t negative = 2 * task.bins * group, positive = negative + task.bins;
        for (int64_t i = negative; i < negative + used.negative; ++i) total[i] += added[i];
        for (int64_t i = positive; i < positive + used.positive; ++i) total[i] += added[i];
      }
      lowest[group] = std::min(lowest[group], Ordered<C>::number(found[group].lo));
      highest[group] = std::max(highest[group], Ordered<C>::number(found[group].hi));
    }
  });
  return all;
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("observe(Tensor values, Tensor inverse, Tensor(a!) range, Tensor(b!)? counts) -> ()");
  m.def("take_in(Tensor values, Tensor inverse, Tensor(a!) lo, Tensor(b!) hi, Tensor(c!)? counts) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("observe", TORCH_BOX(&fakequant::observe));
  m.impl("take_in", TORCH_BOX(&fakequant::take_in));
}
