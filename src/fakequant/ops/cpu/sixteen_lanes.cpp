// Fake quantization, encoding and decoding in registers of 16, for processors with AVX-512, see register_loop.h.

#include "avx512.h"

#ifdef FAKEQUANT_X86
#include "register_loop.h"

namespace fakequant {

template <typename From, typename To>
bool sixteen_at_once(const Call<float>& call, const From* from, To* to, uint8_t* mask, int64_t first, int64_t n) {
  return at_once(call, from, to, mask, first, n);
}
template bool sixteen_at_once(const Call<float>&, const float*, float*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const float*, uint8_t*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const uint8_t*, float*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const int8_t*, float*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const Half*, Half*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const Half*, uint8_t*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const uint8_t*, Half*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const int8_t*, Half*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const BFloat16*, BFloat16*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const BFloat16*, uint8_t*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const uint8_t*, BFloat16*, uint8_t*, int64_t, int64_t);
template bool sixteen_at_once(const Call<float>&, const int8_t*, BFloat16*, uint8_t*, int64_t, int64_t);

}  // namespace fakequant
#endif
