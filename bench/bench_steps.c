/*
 * onebit-bench codec, adam and optimizers: passes over memory, what a step of 1-bit Adam costs
 * without a network, and a step of each optimizer, beside the dense step of the same optimizer.
 *
 * The work of a compressed step is the sum of its passes, each timed alone over all elements, as
 * they cannot stay in a cache: compress and apply and what an optimizer has besides, and a P-th of
 * the reduction, since a rank among P serves a P-th. The dense step is the better one of two: a
 * plain fused loop for the widest vectors of this processor, and the library's own warm-up pass; on
 * a device it is the latter. Beside these, adam has the step as it is on one rank, which serves all
 * of the buffer, and on a device PyTorch's step, where that is installed.
 */
#include <stdio.h>
#include <string.h>

#include "bench/bench_passes.h"
#include "optimizers/optimizer.h"

/* --- Passes of optimizers */

static int run_fused(const struct bench_entry *entry) {
  struct bench_passes *passes = entry->context;
  struct bench_fused fused = {.factors = &bench_factors,
                              .lion = &bench_lion_factors,
                              .learning_rate = passes->learning_rate,
                              .weight_decay = passes->weight_decay,
                              .count = passes->count,
                              .gradient = passes->arrays[BENCH_GRADIENT],
                              .parameter = passes->arrays[BENCH_PARAMETERS],
                              .momentum = passes->arrays[BENCH_MOMENTUM],
                              .variance = passes->arrays[BENCH_VARIANCE],
                              .update = passes->arrays[BENCH_OUTPUT]};
  for (int k = 0; k < 2 && entry->pass->fused[k]; k++)
    entry->pass->fused[k](&fused);
  return BENCH_OK;
}

static int steps_run_step(const struct bench_entry *entry) {
  struct bench_passes *passes = entry->context;
  if (BENCH_HAS_DEVICE(passes->job))
    return bench_kernels_step(passes);
  return bench_status(onebit_optimizer_step(passes->optimizer, passes->learning_rate),
                      "onebit_optimizer_step");
}

/* clang-format off */
const struct bench_pass bench_step = {"1-bit step, one rank", steps_run_step, .whole_step = true};

/* In a dense step the mean gradient is what the exchange has left in scratch, which LAMB's update
 * replaces. */
static const struct bench_pass
    fused_adam = {"fused adam", run_fused, .kinds = {OB_PASS_ADAM}, .fused = {bench_fused_adam}},
    fused_lamb = {"fused lamb", run_fused, .kinds = {OB_PASS_LAMB, OB_PASS_LAMB_MOVE},
                  .fused = {bench_fused_lamb, bench_fused_lamb_move}},
    fused_momentum = {"fused momentum", run_fused, .kinds = {OB_PASS_SGD},
                      .fused = {bench_fused_momentum}},
    fused_lion = {"fused lion", run_fused, .kinds = {OB_PASS_LION}, .fused = {bench_fused_lion}},
    lamb = {"dense lamb", bench_run_pass, .kinds = {OB_PASS_LAMB, OB_PASS_LAMB_MOVE},
            .scratch = BENCH_OUTPUT},
    momentum = {"dense momentum", bench_run_pass, .kinds = {OB_PASS_SGD}},
    lion = {"dense lion", bench_run_pass, .kinds = {OB_PASS_LION}},
    /* gradient, reciprocal, residual and the last bit in; residual and bit out */
    compress_step = {"compress step", bench_run_compress, .inputs = 1, .floats = 3, .bits = 2,
                     .momentum = true, .reciprocals = true},
    /* gradient, second moment, compensated value, last bit in; all but the first out */
    compress_normalized = {"compress normalized", bench_run_compress, .inputs = 1, .floats = 3,
                           .bits = 2, .momentum = true, .moments = true},
    /* likewise without that bit */
    compress_lion = {"compress lion", bench_run_compress, .inputs = 1, .floats = 3, .bits = 1,
                     .moments = true},
    reduce_lion = {"reduce lion", bench_run_reduce, .floats = 2, .bits = 1, .each = {.bits = 1},
                   .streams = true, .serve_rule = OB_SERVE_LION},
    apply_step = {"apply step", bench_run_apply, .kinds = {OB_PASS_APPLY_STEP}},
    lamb_fresh = {"lamb fresh", bench_run_apply, .kinds = {OB_PASS_LAMB_FRESH}, .frozen = true},
    zero_one = {"zero-one apply", bench_run_apply, .kinds = {OB_PASS_ZERO_ONE}, .frozen = true},
    squares = {"zero-one look", bench_run_pass, .kinds = {OB_PASS_SQUARES}, .frozen = true},
    local = {"zero-one local", bench_run_pass, .kinds = {OB_PASS_ZERO_ONE_LOCAL}, .frozen = true},
    to_store = {"zero-one meet", bench_run_pass, .kinds = {OB_PASS_ZERO_ONE_STORE}, .frozen = true,
               .scratch = BENCH_OUTPUT},
    met = {"zero-one met", bench_run_apply, .kinds = {OB_PASS_ZERO_ONE_MET}, .frozen = true};

/* --- Lists: copies, dense steps, parts; the reduction is behind the parts */

static const struct bench_list steps[] = {
    {"Efficient-Adam", false, 2, 2,
     {&fused_adam, &bench_adam, &compress_normalized, &apply_step, &bench_reduce}},
    {"1-bit Adam", false, 2, 2,
     {&fused_adam, &bench_adam, &bench_compress_momentum, &bench_apply, &bench_reduce}},
    {"1-bit Adam, steps", false, 2, 2,
     {&fused_adam, &bench_adam, &compress_step, &apply_step, &bench_reduce}},
    {"1-bit LAMB", false, 2, 3,
     {&fused_lamb, &lamb, &bench_compress_momentum, &lamb_fresh, &bench_apply, &bench_reduce}},
    {"0/1 Adam, bits", false, 2, 2,
     {&fused_adam, &bench_adam, &bench_compress, &zero_one, &bench_reduce}},
    {"0/1 Adam, local step", false, 2, 2, {&fused_adam, &bench_adam, &squares, &local}},
    {"0/1 Adam, synchronisation", false, 2, 3,
     {&fused_adam, &bench_adam, &to_store, &bench_compress, &met, &bench_reduce}},
    {"1-bit momentum SGD", false, 2, 2,
     {&fused_momentum, &momentum, &bench_compress_momentum, &apply_step, &bench_reduce}},
    {"Lion", false, 2, 2, {&fused_lion, &lion, &compress_lion, &apply_step, &reduce_lion}},
};

static const struct bench_list adam_list = {NULL, false, 2, 2,
    {&fused_adam, &bench_adam, &bench_step, &bench_compress_momentum, &bench_apply,
     &bench_reduce}};

/* The codec's list. The plain loops show what memory allows to passes like compress, reduce and
 * store, with a second array for residuals and in place. */
static const struct bench_list codec_list = {NULL, true, 0, 0,
    {&bench_triad, &bench_triad_apart, &bench_scale, &bench_scale_apart, &bench_write,
     &bench_compress, &bench_compress_momentum, &bench_compress_in_place, &bench_reduce,
     &bench_store, &bench_apply}};
/* clang-format on */

/* --- Rows */

static void print_entries(const struct bench_sheet *sheet) {
  const struct bench_list *list = sheet->list;
  const struct bench_entry *dense = list->dense ? bench_sheet_dense(sheet) : NULL;
  bool all = !list->name || sheet->job->options->full;
  for (size_t k = 0; k < sheet->rounds.count; k++) {
    struct bench_entry entry = sheet->rounds.entries[k];
    bool better = dense == &sheet->rounds.entries[k];
    if (list->name)
      snprintf(entry.name, sizeof entry.name, "  %s%s", entry.pass->name,
               better ? " (the dense)" : "");
    if (all || better)
      bench_sheet_row(sheet, &entry);
  }
}

/* Prints the sums of the parts alone, where they have a name, and with a P-th of each reduction. */
static void print_sums(const struct bench_sheet *sheet) {
  const struct bench_list *list = sheet->list;
  char name[48];
  if (list->name)
    bench_sheet_sum(sheet, list->name, NULL);
  for (size_t k = sheet->reduce; list->parts && k < sheet->rounds.count; k++) {
    const struct bench_entry *reduce = &sheet->rounds.entries[k];
    snprintf(name, sizeof name, "%sa rank among %zu", list->name ? "  " : "sum, ", reduce->streams);
    bench_sheet_sum(sheet, name, reduce);
  }
}

/* Measures a list. Steps of optimizers begin with their sums; the first of them has notes. */
static int measure_list(struct bench_job *job, struct bench_passes *passes,
                        const struct bench_list *list) {
  struct bench_sheet sheet;
  int status = bench_sheet_create(job, passes, list, &sheet);
  char about[96];
  snprintf(about, sizeof about, "%s; %s %s", list->parts ? "no network" : "one core",
           list->parts ? "plain loops use" : "the triad loop uses", bench_triad_width());
  if (status == BENCH_OK && (!list->name || list == steps))
    bench_sheet_notes(&sheet, about,
                      list->parts ? "of dense: time against the better one of two dense steps, of "
                                    "the same round, median"
                                  : "GB/s: what the pass must move. of triad, of loop: bytes a "
                                    "second, against the triad loop of the same round, and against "
                                    "a plain loop that reads and writes likewise, median");
  if (status == BENCH_OK) {
    bench_sheet_heads(&sheet);
    status = bench_rounds_measure(&sheet.rounds);
  }
  if (status == BENCH_OK) {
    (list->name ? print_sums : print_entries)(&sheet);
    (list->name ? print_entries : print_sums)(&sheet);
  }
  if (BENCH_HAS_DEVICE(job) && status == BENCH_OK && list->parts)
    bench_torch(&sheet);
  bench_sheet_destroy(&sheet);
  return status;
}

/* --- codec */

/* Measures all codecs that can run here, or the one that was asked for, on the same memory. */
static int measure_codecs(struct bench_job *job, struct bench_passes *passes) {
  const struct ob_codec *codec;
  if (BENCH_HAS_DEVICE(job))
    return measure_list(job, passes, &bench_codec_kernels);
  for (size_t k = 0; (codec = ob_codec_row(k)) != NULL; k++)
    if (ob_codec_usable(codec) &&
        (!job->options->codec || strcmp(codec->name, job->options->codec) == 0)) {
      passes->work.codec = codec;
      BENCH_TRY(measure_list(job, passes, &codec_list));
    }
  return BENCH_OK;
}

/* --- adam */

/* Options of a 1-bit Adam that freezes after its first step. */
static onebit_adam_options_t steps_adam_options(const struct bench_options *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.freeze_step = 1;
  adam.common.device = options->device;
  adam.common.scale = options->scale;
  adam.common.block_size = options->block_size;
  adam.common.chunk_size = options->chunk_size;
  adam.common.threads = options->threads;
  return adam;
}

/* Creates an optimizer in its compressed stage: one step was made, and the host knows. */
static onebit_status_t steps_create_optimizer(struct bench_job *job, struct bench_passes *passes) {
  onebit_tensor_t tensor = {.parameter = passes->stepped,
                            .gradient = passes->arrays[BENCH_GRADIENT],
                            .count = passes->count};
  onebit_adam_options_t adam = steps_adam_options(job->options);
  onebit_status_t status = onebit_adam_create(passes->comm, &tensor, 1, &adam, &passes->optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_step(passes->optimizer, passes->learning_rate);
  if (BENCH_HAS_DEVICE(job) && status == ONEBIT_OK)
    status = bench_kernels_settle(passes);
  return status;
}

static int measure_adam(struct bench_job *job, struct bench_passes *passes) {
  passes->stepped = passes->space->memory->allocate(passes->count, sizeof(float));
  if (!passes->stepped)
    return bench_no_memory("parameters", passes->count);
  BENCH_TRY(bench_space_fill(passes->space, passes->stepped, passes->count, ONEBIT_FLOAT32, 2));
  BENCH_TRY(bench_status(steps_create_optimizer(job, passes), "onebit_adam_create"));
  if (BENCH_HAS_DEVICE(job))
    return measure_list(job, passes, &bench_adam_kernels);
  return measure_list(job, passes, &adam_list);
}

/* --- optimizers: memory */

/* The memory of an optimizer, and of its dense form: moments, and a buffer for the mean
 * gradient. */
struct memory {
  const struct ob_method *method;
  const char *name;
  double dense, bytes, shared;
};

static const struct memory memories[] = {{&ob_method_efficient_adam, "Efficient-Adam", 12, 0, 0},
                                         {&ob_method_adam, "1-bit Adam", 12, 0, 0},
                                         {&ob_method_lamb, "1-bit LAMB", 12, 0, 0},
                                         {&ob_method_zero_one_adam, "0/1 Adam", 12, 0, 0},
                                         {&ob_method_momentum, "1-bit momentum SGD", 8, 0, 0},
                                         {&ob_method_lion, "Lion", 8, 0, 0}};

static void memory_fields(struct bench_table *table, const void *row) {
  const struct memory *memory = row;
  bench_text(table, "optimizer", "Memory", -30, memory->name);
  bench_number(table, "memory_bytes_per_parameter", "B/param.", 11, 2, memory->bytes);
  bench_number(table, "shared_bytes_per_parameter", "of P ranks", 12, 0, memory->shared);
  bench_number(table, "dense_bytes_per_parameter", "dense", 11, 0, memory->dense);
}

/* Sets the defaults, the benchmark's options, and a warm-up of one step. */
static void fill_options(const struct ob_method *method, const struct bench_options *options,
                         unsigned char *given) {
  const size_t one = 1;
  memcpy(given, &method->options_size, sizeof method->options_size);
  for (size_t k = 0; k < method->option_count; k++)
    if (strcmp(method->options[k].name, "freeze_step") == 0)
      memcpy(given + method->options[k].from, &one, sizeof one);
  memcpy(given + method->common_at + offsetof(onebit_optimizer_options_t, residual_copies),
         &options->residual_copies, sizeof options->residual_copies);
}

/* Finds the memory of an optimizer in its compressed stage; not a number for methods without the
 * options. */
static int measure_memory(const struct ob_method *method, const struct bench_options *options,
                          const struct bench_passes *passes, double *bytes) {
  onebit_tensor_t tensor = {.parameter = passes->arrays[BENCH_PARAMETERS],
                            .gradient = passes->arrays[BENCH_GRADIENT],
                            .count = passes->count};
  _Alignas(double) unsigned char given[512] = {0};
  onebit_optimizer_t optimizer = NULL;
  onebit_optimizer_info_t info = {.size = sizeof info};
  fill_options(method, options, given);
  onebit_status_t status = ob_optimizer_create(passes->comm, method, given, &tensor, 1, &optimizer);
  *bytes = NAN;
  if (status == ONEBIT_ERROR_UNSUPPORTED)
    return BENCH_OK;
  if (status == ONEBIT_OK)
    status = onebit_optimizer_step(optimizer, 0);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_get_info(optimizer, &info);
  onebit_optimizer_destroy(optimizer);
  *bytes = (double)info.memory_bytes / (double)passes->count;
  return bench_status(status, method->name);
}

/* Prints the memory of optimizers on the passes' arrays. In CSV these are columns of another table,
 * with heads of its own. */
static int print_memory(struct bench_job *job, const struct bench_passes *passes) {
  struct bench_table *table = job->table;
  table->headed = false;
  bench_note(table, "Memory, bytes a parameter: what one rank alone takes, of it what all P ranks "
                    "share between them,\n# and a dense step with a buffer for the mean gradient");
  for (size_t k = 0; k < sizeof memories / sizeof memories[0]; k++) {
    struct memory memory = memories[k];
    memory.shared = job->options->residual_copies == 1 && !memory.method->serve_rule ? 4 : 8;
    BENCH_TRY(measure_memory(memory.method, job->options, passes, &memory.bytes));
    if (!isnan(memory.bytes))
      bench_print_row(table, memory_fields, &memory);
  }
  return BENCH_OK;
}

static int measure_optimizers(struct bench_job *job, struct bench_passes *passes) {
  if (BENCH_HAS_DEVICE(job)) {
    BENCH_TRY(bench_kernels_extend(passes));
    return measure_list(job, passes, &bench_optimizer_kernels);
  }
  BENCH_TRY(bench_passes_extend(passes));
  for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++)
    BENCH_TRY(measure_list(job, passes, &steps[k]));
  return job->last ? print_memory(job, passes) : BENCH_OK;
}

/* --- Sizes */

typedef int measure_arrays(struct bench_job *job, struct bench_passes *passes);

static int run_size(struct bench_job *job, size_t bytes, void *context) {
  measure_arrays *const *measured = context;
  struct bench_passes passes;
  size_t most = 2, count = bytes / sizeof(float);
  for (size_t k = 0; k < job->options->stream_count; k++)
    most = job->options->streams[k] > most ? job->options->streams[k] : most;
  int status = BENCH_HAS_DEVICE(job) ? bench_kernels_create(job, count, most, &passes)
                                     : bench_passes_create(job, count, most, &passes);
  if (status == BENCH_OK)
    status = (*measured)(job, &passes);
  if (BENCH_HAS_DEVICE(job))
    bench_kernels_destroy(passes.kernels);
  bench_passes_destroy(&passes);
  return status;
}

static int run_on_one_core(struct bench_job *job, measure_arrays *measured) {
  struct bench_options one_core = *job->options;
  one_core.threads = 1;
  job->options = &one_core;
  return bench_each_size(job, run_size, &measured);
}

int bench_run_codec(struct bench_job *job) { return run_on_one_core(job, measure_codecs); }

int bench_run_optimizers(struct bench_job *job) { return run_on_one_core(job, measure_optimizers); }

int bench_run_adam(struct bench_job *job) {
  measure_arrays *measured = measure_adam;
  return bench_each_size(job, run_size, &measured);
}
