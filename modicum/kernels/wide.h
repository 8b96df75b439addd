// One loop, compiled twice: for the machine that every build must run on, and for AVX2 where the
// CPU has it. Internal to `kernels`.
#pragma once

#define MODICUM_INLINE inline __attribute__((always_inline))

namespace modicum {

#if defined(__x86_64__)
template <typename Loop>
__attribute__((target("avx2"))) void run_avx2(Loop loop) noexcept {
  loop();
}

// Calls `loop`, whose operator() must be always_inline so that it takes on its caller's target, and
// must copy its members into locals: what it stores might else alias them, for all that the
// compiler knows, and nothing is vectorised. No
// fused multiply-add is among it: both versions give the same bits. (target_clones would do this
// too, but its ifuncs run before ThreadSanitizer is set up.)
template <typename Loop>
void run_widest(Loop loop) noexcept {
  if (__builtin_cpu_supports("avx2")) return run_avx2(loop);
  loop();
}
#else
template <typename Loop>
void run_widest(Loop loop) noexcept {
  loop();
}
#endif

}  // namespace modicum
