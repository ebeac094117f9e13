// Fake quantization of float32, float16 and bfloat16 to integers and small floats, and to codes of 8 bits and back, in
// one pass over vector registers: nothing in between goes through memory, and the packed mask comes from the
// comparisons. Included behind the header of an instruction set, see lanes.h.
//
// The bits are those of the portable loops in runs.h, which serve everywhere else, except that a NaN of bfloat16 keeps
// its own bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "call.h"
#include "lane_rounding.h"
#include "lanes.h"
#include "quotients.h"
#include "registers.h"
#include "runs.h"
#include "streaming.h"

namespace fakequant {
namespace {

// Bits in the order of the elements, bit i % 8 of byte i / 8, where runs end anywhere within a byte.
struct BitWriter {
  uint8_t* to;
  uint32_t pending = 0;  // bits of a byte that is not full yet
  int64_t count = 0;
  FAKEQUANT_LANES void append(Bits bits, AllLanes) {
    if (count) [[unlikely]] {
      pending |= static_cast<uint32_t>(bits) << count;
      bits = static_cast<Bits>(pending);
      pending >>= kLanes;
    }
    std::memcpy(to, &bits, sizeof(Bits));
    to += sizeof(Bits);
  }
  FAKEQUANT_LANES void append(Bits bits, FirstLanes lanes) {
    pending |= (static_cast<uint32_t>(bits) & ((1u << lanes.count) - 1)) << count;
    for (count += lanes.count; count >= 8; count -= 8, pending >>= 8) *to++ = static_cast<uint8_t>(pending);
  }
  void finish() const {
    if (count) *to = static_cast<uint8_t>(pending);
  }
};

// The parameters of the elements of a register; `at` returns those of the elements from one on, here the same for all.
struct UniformLanes {
  Lanes scale, reciprocal, zero_point, lo, hi;
  template <typename L>
  FAKEQUANT_LANES const UniformLanes& at(int64_t, L) const {
    return *this;
  }
};

// The same where x times `reciprocal` has the codes of x / scale, see quotients.h.
struct ProductLanes : UniformLanes {
  template <typename L>
  FAKEQUANT_LANES const ProductLanes& at(int64_t, L) const {
    return *this;
  }
};

// The same where x is shifted or scales may be negative or 0.
struct ShiftedLanes : UniformLanes {
  Lanes divisor, shift;
  template <typename L>
  FAKEQUANT_LANES const ShiftedLanes& at(int64_t, L) const {
    return *this;
  }
};

inline Params<float> after(const Params<float>& p, int64_t groups) {
  const auto moved = [groups](const float* from) { return from ? from + groups : nullptr; };
  return {p.scale + groups, moved(p.zero_point), moved(p.lo), moved(p.hi)};
}

template <typename L>
FAKEQUANT_LANES Lanes load_present(const float* from, int64_t i, L lanes) {
  return from ? load_lanes(from + i, lanes) : same(0.0f);
}

// Parameters that are in memory in the order of the elements.
template <bool kWithReciprocal>
struct ElementLanes {
  const Params<float>& p;
  template <typename L>
  FAKEQUANT_LANES UniformLanes at(int64_t i, L lanes) const {
    const Lanes scale = load_lanes(p.scale + i, lanes);
    return {scale, kWithReciprocal ? same(1.0f) / scale : scale, load_present(p.zero_point, i, lanes),
            load_present(p.lo, i, lanes), load_present(p.hi, i, lanes)};
  }
};

// The result type: values again, or codes, for which uint8_t stands for both kinds of 8 bits.
template <typename U>
constexpr bool kIsCode = std::is_same_v<U, uint8_t>;

// The loop over a run. Each template parameter multiplies the time that this file takes to compile, and each of these
// is worth 5 to 30 percent of a call's time. The kind of mask is a branch in every turn instead: it always goes the
// same way and takes no time.
template <Arithmetic A, bool kRectified, bool kMasked, typename Rounding>
struct Loop {
  static constexpr bool kWithReciprocal = A == Arithmetic::kReciprocal, kLattice = Rounding::kLattice;
  const Rounding rounding;
  const Mask mask;
  const bool streamed;
  BitWriter bits;
  Bits nan = 0;  // lanes in which a number was NaN, for which there is no code

  FAKEQUANT_LANES Loop(const Call<float>& call, bool streamed, uint8_t* to)
      : rounding(call.grid), mask(call.mask), streamed(streamed), bits{to} {}

  FAKEQUANT_LANES Lanes rectified(Lanes x) const { return kRectified ? higher_of(same(0.0f), x) : x; }

  FAKEQUANT_LANES Bits passes(Lanes x, const Rounded& rounded, const UniformLanes& p) const {
    const Bits within = inside(x, rounded, p);
    return kRectified ? within & differ(x, same(0.0f)) : within;
  }

  FAKEQUANT_LANES Bits inside(Lanes x, const Rounded& rounded, const UniformLanes& p) const {
    if (mask == Mask::kCodeRange) [[likely]]
      return rounded.inside;
    if (mask == Mask::kEverywhere) return static_cast<Bits>(-1);
    if (mask == Mask::kInputRange) return at_most(p.lo, x) & at_most(x, p.hi);
    return below(p.lo, x) & below(x, p.hi);
  }

  FAKEQUANT_LANES Lanes value(Lanes code, const UniformLanes& p) const {
    if constexpr (A == Arithmetic::kMultiplier) {
      if constexpr (!Rounding::kInteger) code = code + rounding.zero;
      return code / p.scale;
    }
    if constexpr (Rounding::kOffset) return (code - p.zero_point) * p.scale;
    if constexpr (Rounding::kLattice) return (code + rounding.zero) * p.scale - p.zero_point;
    // Rounded once, like the product: adding a zero changes zeros alone.
    return fused(code, p.scale, rounding.zero);
  }

  // Division, where quotients.h does not allow a product: on a Zen 4 and a Zen 5, x r and two FMA that correct it
  // (Markstein 1990) take as long.
  template <typename P>
  FAKEQUANT_LANES Rounded rounded(Lanes x, const P& p) const {
    Lanes divisor = p.scale;
    if constexpr (std::is_same_v<P, ShiftedLanes>) x = x + p.shift, divisor = p.divisor;
    constexpr bool kByProduct = A == Arithmetic::kReciprocal || std::is_same_v<P, ProductLanes>;
    const Lanes scaled = kByProduct                ? x * p.reciprocal
                         : A == Arithmetic::kDivide ? x / divisor
                                                    : x * p.scale;
    return rounding.round(scaled, x, p.zero_point);
  }

  template <typename T, typename U, typename P, typename L>
  FAKEQUANT_LANES void step(const T* from, U* to, const P& p, L lanes) {
    const Lanes x = rectified(load_lanes(from, lanes));
    const Rounded found = rounded(x, p);
    if constexpr (kMasked) bits.append(passes(x, found, p), lanes);
    if constexpr (kIsCode<U>) {
      nan |= differ(x, x);
      store_codes(to, higher_of(found.code, rounding.lo), lanes);  // the least for NaN
    } else {
      store_lanes(to, value(found.code, p), lanes);
    }
  }

  // As many whole registers as there are; returns how many elements they have.
  template <typename T, typename U, typename P, typename L>
  FAKEQUANT_LANES int64_t run_whole(const T* x, U* y, int64_t n, const P& p, L all) {
    int64_t i = 0;
    if constexpr (!kMasked && kInPairs<T> && !kIsCode<U> && std::is_base_of_v<UniformLanes, P>) {
      for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const Pairs v = load_pairs(x + i);
        const Lanes even = rectified(v.even), odd = rectified(v.odd);
        store_pairs(y + i, {value(rounded(even, p).code, p), value(rounded(odd, p).code, p)}, all);
      }
    }
    for (; i + kLanes <= n; i += kLanes) step(x + i, y + i, p.at(i, all), all);
    return i;
  }

  // Whether no result except zero is subnormal.
  bool gives_normal(float scale) const {
    const float least = A == Arithmetic::kMultiplier ? rounding.smallest / scale : rounding.smallest * scale;
    return least >= std::numeric_limits<float>::min();
  }

  // A run with the parameters of one group, `of`.
  template <typename T, typename U, typename P>
  FAKEQUANT_LANES void run_of_one(const T* x, U* y, int64_t n, const P& p, const Uniform<float>& of) {
    if constexpr (A == Arithmetic::kDivide && Rounding::kInteger && !Rounding::kLattice && std::is_same_v<T, BFloat16>) {
      if (n >= kWorthAsking) {
        if (const float r = reciprocal_for_integers(of.scale, rounding.middles(of.zero_point))) {
          const ProductLanes product{{p.scale, same(r), p.zero_point, p.lo, p.hi}};
          return run_with(x, y, n, product, of.scale);
        }
      }
    }
    run_with(x, y, n, p, of.scale);
  }

  template <typename T, typename U, typename P>
  FAKEQUANT_LANES void run_with(const T* x, U* y, int64_t n, const P& p, float scale) {
    if constexpr (std::is_same_v<T, BFloat16> && !kIsCode<U> && !Rounding::kLattice) {
      if (kConvertsBFloat16 && gives_normal(scale))
        return run(*this, static_cast<const NormalBFloat16*>(x), static_cast<NormalBFloat16*>(y), n, p);
    }
    run(*this, x, y, n, p);
  }
};

// A run by a loop: whole registers, then the rest.
template <typename Loop, typename T, typename U, typename P>
FAKEQUANT_LANES void run(Loop& loop, const T* x, U* y, int64_t n, const P& p) {
  const bool past = loop.streamed && begins_line(y);
  const int64_t i = past ? loop.run_whole(x, y, n, p, StreamedLanes{}) : loop.run_whole(x, y, n, p, AllLanes{});
  if (i < n) loop.step(x + i, y + i, p.at(i, FirstLanes{n - i}), FirstLanes{n - i});
}

// Codes to values.
template <bool kMultiplier, bool kOffset>
struct DecodeLoop {
  static constexpr bool kWithReciprocal = false, kLattice = false;
  const bool streamed;

  template <typename Q, typename T, typename L>
  FAKEQUANT_LANES void step(const Q* from, T* to, const UniformLanes& p, L lanes) const {
    Lanes code = load_codes(from, lanes);
    if constexpr (kOffset) code = code - p.zero_point;
    store_lanes(to, kMultiplier ? code / p.scale : code * p.scale, lanes);
  }

  template <typename Q, typename T, typename P, typename L>
  FAKEQUANT_LANES int64_t run_whole(const Q* codes, T* y, int64_t n, const P& p, L all) const {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) step(codes + i, y + i, p.at(i, all), all);
    return i;
  }

  template <typename Q, typename T>
  FAKEQUANT_LANES void run_of_one(const Q* codes, T* y, int64_t n, const UniformLanes& p, const Uniform<float>&) const {
    run(*this, codes, y, n, p);
  }
};

// Prefetches n elements, which may lie behind the end of the tensor.
template <typename T>
FAKEQUANT_LANES void fetch(const T* x, int64_t ahead, int64_t n) {
  constexpr uintptr_t kLine = 64, kSize = sizeof(T);
  const uintptr_t first = reinterpret_cast<uintptr_t>(x) + ahead * kSize;
  for (uintptr_t line = first; line < first + n * kSize; line += kLine)
    __builtin_prefetch(reinterpret_cast<const void*>(line));
}

// Runs of `length` elements, the last of which may end sooner, with the parameters of one group each.
template <typename L, typename T, typename U>
FAKEQUANT_LANES void each_run(L& loop, const Call<float>& call, const T* x, U* y, int64_t n, int64_t length,
                              const Params<float>& p) {
  for (int64_t i = 0, g = 0; i < n; i += length, ++g) {
    if (call.ahead) fetch(x + i, call.ahead, std::min(length, n - i));
    const Uniform<float> of = uniform_of(p, g);
    const Lanes scale = same(of.scale);
    const UniformLanes uniform{scale, L::kWithReciprocal ? same(1.0f) / scale : scale, same(of.zero_point),
                               same(of.lo), same(of.hi)};
    const int64_t elements = std::min(length, n - i);
    if constexpr (L::kLattice) {
      const ShiftedLanes shifted{uniform, same(call.divisor(of.scale)), same(call.shift(of.zero_point))};
      loop.run_of_one(x + i, y + i, elements, shifted, of);
    } else {
      loop.run_of_one(x + i, y + i, elements, uniform, of);
    }
  }
}

// A loop over the elements [first, first + n) of the tiles; x and y point to the first.
template <typename L, typename T, typename U>
FAKEQUANT_LANES void walk(L& loop, const Call<float>& call, const T* x, U* y, int64_t first, int64_t n) {
  Spread<float> spread;
  for (int64_t i = 0, piece; i < n; i += piece) {
    const Cursor at(call.tiles, first + i);
    Params<float> p = after(call.params, at.group);
    // Groups that follow each other from here, in one row no more than are needed: their elements may be more than
    // int64 counts.
    const int64_t columns = at.columns * at.rows == 1 ? (n - i) / at.length + 1 : at.columns - at.column;
    if (at.within || at.length >= kLanes) {
      piece = std::min(n - i, at.within ? at.length - at.within : columns * at.length);
      each_run(loop, call, x + i, y + i, piece, at.within ? piece : at.length, p);
      continue;
    }
    if (at.length == 1 && at.columns >= 2 * kLanes) {
      piece = std::min(n - i, columns);
    } else {
      piece = std::min(n - i, kChunk);
      const PerElement<float> e = spread.fill(call, first + i, piece);
      p = {e.scale, e.zero_point, e.lo, e.hi};
    }
    run(loop, x + i, y + i, piece, ElementLanes<L::kWithReciprocal>{p});
  }
  if (loop.streamed) finish_streaming();
}

// Values or codes, and whether a number was NaN where it is codes; mask points to the bit of the first element.
template <Arithmetic A, bool kRectified, bool kMasked, typename Rounding, typename T, typename U>
FAKEQUANT_TARGET bool quantize_by(const Call<float>& call, const T* x, U* y, uint8_t* mask, int64_t first, int64_t n) {
  bool streamed = false;
  // What is written over itself is in the caches already.
  if constexpr (!kIsCode<U>) streamed = x != y && streams(call.tiles.elements() * static_cast<int64_t>(sizeof(T)));
  Loop<A, kRectified, kMasked, Rounding> loop(call, streamed, mask);
  walk(loop, call, x, y, first, n);
  loop.bits.finish();
  return loop.nan != 0;
}

template <Arithmetic A, typename Rounding, typename T, typename U>
bool quantize_masked(const Call<float>& call, const T* x, U* y, uint8_t* mask, int64_t first, int64_t n) {
  if (mask) return quantize_by<A, false, true, Rounding>(call, x, y, mask, first, n);
  return quantize_by<A, false, false, Rounding>(call, x, y, mask, first, n);
}

template <Arithmetic A, typename Rounding, typename T, typename U>
bool quantize_as(const Call<float>& call, const T* x, U* y, uint8_t* mask, int64_t first, int64_t n) {
  if constexpr (A == Arithmetic::kDivide && !kIsCode<U>) {  // see serves_registers
    if (call.rectified && mask) return quantize_by<A, true, true, Rounding>(call, x, y, mask, first, n);
    if (call.rectified) return quantize_by<A, true, false, Rounding>(call, x, y, mask, first, n);
  }
  return quantize_masked<A, Rounding>(call, x, y, mask, first, n);
}

template <Arithmetic A, typename T, typename U>
bool quantize_in(const Call<float>& call, const T* x, U* y, uint8_t* mask, int64_t first, int64_t n) {
  if constexpr (!kIsCode<U>) {
    if (!call.grid.is_integer()) return quantize_as<A, FloatLanes>(call, x, y, mask, first, n);
  }
  if constexpr (A == Arithmetic::kDivide) {  // see serves_registers
    if (call.shifted || (call.exact && !call.params.zero_point))
      return quantize_masked<A, LatticeLanes<false>>(call, x, y, mask, first, n);
    if (call.exact) return quantize_masked<A, LatticeLanes<true>>(call, x, y, mask, first, n);
  }
  if constexpr (A != Arithmetic::kMultiplier) {
    if (call.params.zero_point) return quantize_as<A, IntegerLanes<true>>(call, x, y, mask, first, n);
  }
  return quantize_as<A, IntegerLanes<false>>(call, x, y, mask, first, n);
}

template <typename T, typename U>
bool quantize(const Call<float>& call, const T* x, U* y, uint8_t* mask, int64_t first, int64_t n) {
  switch (call.arithmetic) {
    case Arithmetic::kDivide: return quantize_in<Arithmetic::kDivide>(call, x, y, mask, first, n);
    case Arithmetic::kReciprocal: return quantize_in<Arithmetic::kReciprocal>(call, x, y, mask, first, n);
    case Arithmetic::kMultiplier: return quantize_in<Arithmetic::kMultiplier>(call, x, y, mask, first, n);
  }
  return false;
}

template <bool kMultiplier, bool kOffset, typename Q, typename T>
FAKEQUANT_TARGET void decode_by(const Call<float>& call, const Q* codes, T* y, int64_t first, int64_t n) {
  DecodeLoop<kMultiplier, kOffset> loop{streams(call.tiles.elements() * static_cast<int64_t>(sizeof(T)))};
  walk(loop, call, codes, y, first, n);
}

template <typename Q, typename T>
void decode(const Call<float>& call, const Q* codes, T* y, int64_t first, int64_t n) {
  if (call.arithmetic == Arithmetic::kMultiplier) return decode_by<true, false>(call, codes, y, first, n);
  if (call.params.zero_point) return decode_by<false, true>(call, codes, y, first, n);
  decode_by<false, false>(call, codes, y, first, n);
}

// The functions sixteen_at_once and eight_at_once of registers.h.
template <typename From, typename To>
bool at_once(const Call<float>& call, const From* from, To* to, uint8_t* mask, int64_t first, int64_t n) {
  if constexpr (sizeof(From) > 1) {
    return quantize(call, from, to, mask, first, n);
  } else {
    decode(call, from, to, first, n);
    return false;
  }
}

}  // namespace
}  // namespace fakequant
