// What a level's file needs from outside, included before its `#pragma GCC target`: a standard
// inline function compiled under the pragma could be the copy that the linker keeps for everybody,
// and then fault on an older machine.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

// g++ 12 warns about its own undefined-vector idiom inside avx512fintrin.h wherever that is
// inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
