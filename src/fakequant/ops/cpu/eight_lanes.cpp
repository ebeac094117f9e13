// Fake quantization in registers of 8, for processors with AVX2 or NEON, see register_loop.h.

#include "avx2.h"
#include "neon.h"

#if defined(FAKEQUANT_X86) || defined(FAKEQUANT_NEON)
#include "register_loop.h"

namespace fakequant {

template <typename T>
void quantize_eight(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  quantize(call, x, y, mask, first, n);
}
template void quantize_eight(const Call<float>&, const float*, float*, uint8_t*, int64_t, int64_t);
template void quantize_eight(const Call<float>&, const Half*, Half*, uint8_t*, int64_t, int64_t);
template void quantize_eight(const Call<float>&, const BFloat16*, BFloat16*, uint8_t*, int64_t, int64_t);

}  // namespace fakequant
#endif
