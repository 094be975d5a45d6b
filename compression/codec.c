/* Lists the codecs, and chooses one that this CPU can run. */
#include "compression/codec.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/error.h"
#include "base/knobs.h"

static bool is_always_usable(void) { return true; }

#if defined(__x86_64__)
/* Returns true if the processor has AVX, F16C and these features. It executes CPUID itself: some
 * compilers' __builtin_cpu_supports does not know F16C, and zig's runtime library lacks that
 * function.
 *   state   bits of XCR0: registers that the operating system keeps for each thread */
static bool processor_has_features(unsigned leaf_7_ebx, unsigned state) {
  unsigned a, b, c, d, low, high;
  const unsigned leaf_1_ecx = bit_OSXSAVE | bit_AVX | bit_F16C;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf_1_ecx) != leaf_1_ecx)
    return false;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state) == state && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
         (b & leaf_7_ebx) == leaf_7_ebx;
}

static bool has_avx2(void) { return processor_has_features(bit_AVX2, 0x06); } /* xmm, ymm */

static bool has_avx512(void) { /* also masks, upper halves of zmm0 to 15, and zmm16 to 31 */
  return processor_has_features(bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL,
                                0xe6);
}
#endif

/* The codecs, in descending order of speed. */
static const struct {
  const struct ob_codec *codec;
  bool (*usable)(void);
} rows[] = {
#if defined(__x86_64__)
    {&ob_codec_avx512, has_avx512},
    {&ob_codec_avx2, has_avx2},
#elif defined(__aarch64__)
    {&ob_codec_neon, is_always_usable},
#endif
    {&ob_codec_scalar, is_always_usable},
};

enum { row_count = sizeof rows / sizeof rows[0] };

const struct ob_codec *ob_codec_row(size_t index) {
  return index < row_count ? rows[index].codec : NULL;
}

bool ob_codec_usable(const struct ob_codec *codec) {
  for (size_t i = 0; i < row_count; i++)
    if (rows[i].codec == codec)
      return rows[i].usable();
  return false;
}

static void list_usable_names(char *text, size_t size) {
  size_t used = 0;
  for (size_t i = 0; i < row_count; i++)
    if (rows[i].usable() && used < size)
      used +=
          (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", rows[i].codec->name);
}

onebit_status_t ob_codec_find(const char *name, const struct ob_codec **codec) {
  for (size_t i = 0; i < row_count; i++)
    if (rows[i].usable() && (!name || strcmp(name, rows[i].codec->name) == 0)) {
      *codec = rows[i].codec;
      return ONEBIT_OK;
    }
  char names[128] = "";
  list_usable_names(names, sizeof names);
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "codec %s is unknown or not usable on this processor, which can run %s", name,
                  names);
}

onebit_status_t ob_codec_choose(const struct ob_codec **codec) {
  const char *name = ob_knob_text(OB_KNOB_CODEC);
  onebit_status_t status = ob_codec_find(name, codec);
  if (status != ONEBIT_OK)
    ob_error(status, "%s=%s: %.300s", ob_knob_label(OB_KNOB_CODEC), name, onebit_last_error());
  return status;
}
