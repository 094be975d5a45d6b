/* The codec for AArch64 processors. */
#if defined(__aarch64__)

#include "compression/codec.h"
#include "compression/vector_neon.h"

#define CODEC      ob_codec_neon
#define CODEC_NAME "neon"
#include "compression/codec_template.h"

#else
typedef int ob_no_neon_here; /* ISO C wants a declaration in every file */
#endif
