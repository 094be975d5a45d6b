/* Messages, residuals and results are the recorded ones, to the bit, with every codec that can run
 * here. */
#include <inttypes.h>

#include "tests/golden_digests.h"
#include "tests/support.h"

static void same(const char *codec, const struct golden *wanted, const struct golden *made,
                 const char *what, uint64_t want, uint64_t have) {
  cr_expect_str_eq(made->name, wanted->name, "%s", codec);
  cr_expect_eq(have, want, "%s: %s, %s: %016" PRIx64 ", recorded is %016" PRIx64, codec,
               wanted->name, what, have, want);
}

Test(golden, every_width_rule_and_type_is_as_recorded) {
  cr_assert_eq(golden_count(), sizeof golden_digests / sizeof golden_digests[0]);
  for (size_t row = 0; ob_codec_row(row); row++) {
    const struct ob_codec *codec = ob_codec_row(row);
    if (!ob_codec_usable(codec)) {
      printf("codec %s: not usable on this processor, not tested\n", codec->name);
      continue;
    }
    for (size_t i = 0; i < golden_count(); i++) {
      const struct golden *wanted = &golden_digests[i], made = golden_run(i, codec);
      cr_assert_not_null(made.name, "no memory");
      same(codec->name, wanted, &made, "messages", wanted->messages, made.messages);
      same(codec->name, wanted, &made, "residuals", wanted->residuals, made.residuals);
      same(codec->name, wanted, &made, "results", wanted->results, made.results);
    }
  }
}

/* Rows differ where what they are of does: else they would not see it. In 8 bits nothing is cut
 * off, whatever the rule. */
Test(golden, rows_differ) {
  for (size_t i = 0; i < golden_count(); i++)
    for (size_t k = 0; k < i; k++) {
      const struct golden *a = &golden_digests[i], *b = &golden_digests[k];
      cr_expect(a->messages != b->messages || (*a->name == '8' && i - k == 1), "%s and %s", a->name,
                b->name);
    }
}
