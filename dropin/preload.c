/* Reads the settings, and judges the exit status at the end of the process. */
#define _GNU_SOURCE /* on_exit */
#include "dropin/preload.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/error.h"
#include "base/knobs.h"

struct ob_preload ob_preload = {.min_count = {SIZE_MAX, SIZE_MAX, SIZE_MAX},
                                .below = OB_REASON_SMALL};

onebit_status_t ob_preload_read_settings(void) {
  int required = 0;
  OB_TRY(ob_config_check());
  OB_TRY(ob_knob_number(OB_KNOB_REQUIRE, 0, 1, 0, &required));
  ob_preload.required = required;
  OB_TRY(ob_rules_load(ob_knob_text(OB_KNOB_RULES), &ob_preload.rules));
  return ob_rules_apply_environment(OB_SAFE_BITS, &ob_preload.rules);
}

uint64_t ob_preload_hash(void) {
  uint64_t hash = ob_rules_hash(&ob_preload.rules);
  for (const char *c = onebit_version(); *c; c++)
    hash = hash * 31 + (uint64_t)*c;
  return hash;
}

static void set_min_counts(bool open) {
  for (onebit_operation_t of = ONEBIT_ALLREDUCE; of <= ONEBIT_REDUCE_SCATTER; of++)
    atomic_store(&ob_preload.min_count[of],
                 open ? ob_rules_min_count(&ob_preload.rules, of) : SIZE_MAX);
}

void ob_preload_open(void) { set_min_counts(true); }
void ob_preload_close(void) { set_min_counts(false); }

void ob_preload_refuse(const char *why) {
  ob_preload.refused = why;
  atomic_store(&ob_preload.below, why ? OB_REASON_REFUSED : OB_REASON_SMALL);
}

/* ---- The end of the process ---- */

static bool (*judge)(void);
static pid_t process;

void ob_preload_judge_exit(bool (*has_succeeded)(void)) {
  judge = has_succeeded;
  process = getpid();
}

static void judge_exit(int status, void *nothing) {
  (void)nothing;
  if (!judge || process != getpid() || judge() || status != 0)
    return;
  fflush(NULL);
  _exit(EXIT_FAILURE);
}

/* Registers judge_exit before the program's own handlers: the handler that is registered first is
 * called last. */
__attribute__((constructor)) static void watch_exit(void) { on_exit(judge_exit, NULL); }
