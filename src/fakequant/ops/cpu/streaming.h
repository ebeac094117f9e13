// Large results go to memory past the caches, which then need not fetch what is overwritten whole.
#pragma once

#include <cstdint>

#include "call.h"

namespace fakequant {

// Whether a result of this size is streamed.
bool streams(int64_t bytes);

inline bool begins_line(const void* to) { return reinterpret_cast<uintptr_t>(to) % 64 == 0; }

// After the last of a thread's streamed stores, which other threads may see late otherwise.
inline void finish_streaming() {
#ifdef FAKEQUANT_X86
  _mm_sfence();
#endif
}

}  // namespace fakequant
