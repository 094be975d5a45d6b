/* ONEBIT_DEBUG: what each level says, where it goes, and what is refused. */
#include <fcntl.h>
#include <sys/stat.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/file.h"
#include "base/log.h"
#include "tests/support.h"
#include "tests/support_irregular.h"

enum { RANKS = 2, STEPS = 6, COUNT = 64 };

/* A training that freezes, with a step that is skipped. */
static void train(onebit_comm_t comm, void *context) {
  static _Thread_local float parameter[COUNT], gradient[COUNT];
  const onebit_tensor_t tensor = {.parameter = parameter, .gradient = gradient, .count = COUNT};
  onebit_optimizer_t optimizer = NULL;
  (void)context;
  onebit_efficient_adam_options_t options = {.size = sizeof options, .warmup_steps = 3};
  CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < STEPS; step++) {
    gradient[0] = step == STEPS - 1 ? (float)(1e300 * 1e300) : 1;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f),
                 step == STEPS - 1 ? ONEBIT_SKIPPED : ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
}

/* The lines of two ranks at a level, "" for none. */
static const char *said_by(rank_body *body, void *context, const char *level) {
  static char text[1 << 14], path[] = "/tmp/onebit-log-XXXXXX", pattern[64], host[64] = "",
                             named[160];
  close(mkstemp(path));
  unlink(path);
  gethostname(host, sizeof host - 1);
  snprintf(pattern, sizeof pattern, "%s-%%h-%%r.%%", path);
  snprintf(named, sizeof named, "%s-%s-0.%%", path, host);
  if (*level)
    setenv("ONEBIT_DEBUG", level, 1);
  setenv("ONEBIT_DEBUG_FILE", pattern, 1);
  on_ranks(RANKS, body, context);
  FILE *file = fopen(named, "r");
  if (!file) { /* another rank was the first */
    named[strlen(named) - 3] = '1';
    file = fopen(named, "r");
  }
  cr_assert(file, "%s", named);
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  unlink(named);
  return text;
}

static const char *said_at(const char *level) { return said_by(train, NULL, level); }

static int times(const char *text, const char *part) {
  int found = 0;
  for (; (text = strstr(text, part)); text++)
    found++;
  return found;
}

Test(log, warn_is_the_default_and_says_nothing_of_what_goes_well) {
  cr_expect_str_eq(said_at(""), "");
}

#ifdef _OPENMP
static void plan_with_threads(onebit_comm_t comm, void *processors) {
  for (int more = 0; more < 3; more++) {
    onebit_plan_t plan = NULL;
    onebit_plan_options_t options = {.size = sizeof options, .threads = *(int *)processors + more};
    CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK);
    onebit_plan_destroy(plan);
  }
}

Test(log, threads_without_processors_are_warned_of_once) {
  int processors = omp_get_num_procs();
  char wanted[80];
  snprintf(wanted, sizeof wanted, "threads is %d, but this rank may use %d processor",
           processors + 1, processors);
  const char *said = said_by(plan_with_threads, &processors, "");
  cr_expect_eq(times(said, "threads is"), 1, "%s", said);
  cr_expect_eq(times(said, wanted), 1, "%s", said);
}
#endif

static void create_some(onebit_comm_t comm, void *context) {
  float parameter[8] = {0}, gradient[8] = {0};
  const onebit_tensor_t tensor = {parameter, gradient, 8, 0, 0, 0};
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT, never = adam, deepspeed = adam;
  const onebit_adam_options_t *const of_adam[] = {&deepspeed, &never, &adam, &adam};
  never.freeze_step = ONEBIT_FREEZE_NEVER;
  deepspeed.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  onebit_efficient_adam_options_t ratios = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t made[7] = {NULL};
  ratios.trust_ratio = 1;
  (void)context;
  for (int k = 0; k < 4; k++)
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, of_adam[k], &made[k]), ONEBIT_OK);
  CHECK_STATUS(onebit_lamb_create(comm, &tensor, 1, NULL, &made[4]), ONEBIT_OK);
  CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, NULL, &made[5]), ONEBIT_OK);
  CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, &ratios, &made[6]), ONEBIT_OK);
  for (int k = 0; k < 7; k++)
    onebit_optimizer_destroy(made[k]);
}

Test(log, what_is_not_recommended_is_said_once) {
  const char *text = said_by(create_some, NULL, "WARN");
  cr_expect_eq(times(text, "\n"), 3, "%s", text);
  cr_expect_eq(times(text, "Take Efficient-Adam without trust_ratio"), 1, "%s", text);
  cr_expect_eq(times(text, "rank 0: adam is not recommended"), 1, "%s", text);
  cr_expect_eq(times(text, "Take Efficient-Adam (onebit_efficient_adam_create)"), 2, "%s", text);
}

Test(log, info_says_what_is_decided) {
  const char *text = said_at("INFO");
  cr_expect_eq(times(text, "onebit INFO "), times(text, "\n"), "%s", text);
  cr_expect_eq(times(text, ": communicator of 2 ranks on "), RANKS, "%s", text);
  cr_expect_eq(times(text, ": plan 1: 64 elements, schedule "), RANKS, "%s", text);
  cr_expect_eq(times(text, ": efficient_adam: frozen after step 3\n"), RANKS, "%s", text);
  cr_expect_eq(times(text, ": efficient_adam: a step after step 5 is skipped: "), RANKS, "%s",
               text);
  cr_expect(times(text, " rank 0: ") > 0 && times(text, " rank 1: ") > 0, "%s", text);
}

Test(log, trace_says_each_call) {
  const char *text = said_at("TRACE");
  cr_expect_eq(times(text, "onebit TRACE "), RANKS * STEPS, "%s", text);
  cr_expect_eq(times(text, " ms, ONEBIT_OK\n"), RANKS * (STEPS - 1), "%s", text);
  cr_expect_eq(times(text, " ms, ONEBIT_SKIPPED\n"), RANKS, "%s", text);
  cr_expect(times(text, "allreduce call 1 of plan ") >= RANKS, "%s", text);
  cr_expect_eq(times(text, " bytes sent, "), RANKS * STEPS, "%s", text);
}

static void check_refused(const char *name, const char *value, onebit_status_t wanted,
                          const char *message) {
  onebit_comm_t comm = NULL;
  setenv(name, value, 1);
  CHECK_STATUS(onebit_comm_create_self(&comm), wanted);
  CHECK_WORDS(message);
  unsetenv(name);
}

Test(log, what_is_wrong_is_refused) {
  char longer[2000] = "";
  memset(longer, 'a', sizeof longer - 1);
  check_refused("ONEBIT_DEBUG", "info", ONEBIT_ERROR_ARGUMENT,
                "ONEBIT_DEBUG=info: neither WARN, INFO nor TRACE");
  check_refused("ONEBIT_DEBUG_FILE", "/nowhere/at.all", ONEBIT_ERROR_FILE,
                "ONEBIT_DEBUG_FILE=/nowhere/at.all: No such file");
  check_refused("ONEBIT_DEBUG_FILE", longer, ONEBIT_ERROR_FILE, "too long");
  char path[] = "/tmp/onebit-log-XXXXXX";
  for (enum irregular kind = A_FIFO; kind <= A_DIRECTORY; kind++) {
    strcpy(path + sizeof path - 7, "XXXXXX");
    close(mkstemp(path));
    unlink(path);
    irregular_make(kind, path);
    check_refused("ONEBIT_DEBUG_FILE", path, ONEBIT_ERROR_FILE,
                  kind == A_DIRECTORY ? "Is a directory" : "not a regular file");
    irregular_remove(kind, path);
  }
}

Test(log, paths_are_expanded_or_too_long) {
  char path[8];
  cr_expect(ob_expand_path("a%r%x%", 17, path, sizeof path) && strcmp(path, "a17%x%") == 0);
  cr_expect(ob_expand_path("1234567", 0, path, sizeof path) && strcmp(path, "1234567") == 0);
  cr_expect_not(ob_expand_path("12345678", 0, path, sizeof path));
  cr_expect_not(ob_expand_path("12345%r", 123, path, sizeof path));
}

/* A FIFO is not waited for when its reader leaves lines in it too long. */
Test(log, a_fifo_with_a_reader_does_not_block) {
  char directory[] = "/tmp/onebit-log-XXXXXX", path[64];
  FILE *file;
  cr_assert(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/fifo", directory);
  cr_assert(mkfifo(path, 0600) == 0);
  cr_expect_eq(ob_output_open(&file, path, true), OB_INPUT_IRREGULAR);
  int reader = open(path, O_RDONLY | O_NONBLOCK);
  cr_assert_eq(ob_output_open(&file, path, true), 0);
  bool well = true;
  for (int k = 0; k < 10000 && well; k++)
    well = fprintf(file, "%0100d\n", k) > 0 && fflush(file) == 0;
  cr_expect(!well && errno == EAGAIN);
  fclose(file);
  close(reader);
  unlink(path);
  rmdir(directory);
}
