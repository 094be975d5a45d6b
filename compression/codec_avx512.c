/* The codec for x86-64 processors with AVX-512 (F, BW, DQ, VL). Compiled with these switched on:
 * nothing in this file may be called unless ob_codec_usable. */
#if defined(__x86_64__)

#include "compression/codec.h"
#include "compression/vector_avx512.h"

#define CODEC      ob_codec_avx512
#define CODEC_NAME "avx512"
#include "compression/codec_template.h"

#else
typedef int ob_no_avx512_here; /* ISO C wants a declaration in every file */
#endif
