// On x86-64 compiles a loop twice: for the build's baseline instruction set, and for CPUs with
// AVX2. Internal to `kernels`.
#pragma once

#define MODICUM_INLINE inline __attribute__((always_inline))

namespace modicum {

#if defined(__x86_64__)
template <typename Loop>
__attribute__((target("avx2"))) void run_avx2(Loop loop) noexcept {
  loop();
}

// Calls `loop`. Its operator() must be always_inline, to be compiled for the caller's target, and
// must copy its members into locals, since a store might alias them and prevent vectorisation.
// Neither version uses FMA, so both give the same bits. (target_clones would do the same, but its
// ifuncs run before ThreadSanitizer is set up.)
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
