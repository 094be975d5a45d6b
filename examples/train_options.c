/* Implements train_options.h, with a table of the options. */
#include "examples/train_options.h"

#include <stdio.h>
#include <string.h>

#include "onebit/onebit.h"

#define AT(field) offsetof(train_options_t, field)

/* --- The table. Most upper limits only keep products of sizes below the limit of size_t. -------*/

static const char *const optimizer_names[] = {
    "efficient-adam", "adam", "efficient-lamb", "lamb", "zero-one-adam", "momentum", "lion", NULL};
static const char *const method_names[] = {"given", "auto", "auto-local-steps", NULL};
static const char *const hard_names[] = {"none", "idle", "same", NULL};
static const char *const exchange_names[] = {"momentum", "step", NULL};
static const char *const shards_names[] = {"none", "step", "parameters", NULL};
static const char *const scale_names[] = {"rms", "mean-absolute", NULL};
static const char *const warmup_bits_names[] = {"none", "4", "8", NULL};
static const char *const bits_names[] = {"1", "2", "4", "8", NULL};
static const char *const outer_rule_names[] = {"mean", "momentum", "nesterov", NULL};
static const char *const outer_bits_names[] = {"auto", "1", "2", "4", "8", "32", "sparse", NULL};
static const char *const parameters_names[] = {"float32", "bfloat16", "float16", NULL};

/* Reads a number from `low` to `high`, or `word`, which stands for the number `special`. */
static const char *read_special(size_t *field, const char *value, double low, double high,
                                const char *word, size_t special, const char *expected) {
  const char *end = tool_read_integer(value, false, field);
  if (strcmp(value, word) == 0)
    *field = special;
  else if (!end || *end || (double)*field < low || (double)*field > high)
    return expected;
  return NULL;
}

static const char *read_freeze_step(void *values, const char *value) {
  return read_special(&((train_options_t *)values)->freeze, value, 0, 1e9, "auto", FREEZE_AUTOMATIC,
                      "expected an integer from 0 to 1000000000, or auto");
}

static const char *train_read_block_size(void *values, const char *value) {
  return read_special(&((train_options_t *)values)->block_size, value, 32, 65536, "buffer",
                      ONEBIT_BLOCK_BUFFER, "expected an integer from 32 to 65536, or buffer");
}

const char *train_read_path(void *values, const char *value) {
  paths_t *paths = &((train_options_t *)values)->data;
  if (paths->count == MOST_PATHS)
    return "too many; give a directory";
  paths->path[paths->count++] = value;
  return NULL;
}

int train_check_text(const train_options_t *options, char error[TRAIN_ERROR]) {
  if (options->data.count > 0)
    return 0;
  snprintf(error, TRAIN_ERROR, "--data: missing; give a text file or a directory of them");
  return -1;
}

/* clang-format off */
const struct tool_option train_rows[] = {
    {.kind = TOOL_HEADING, .help = "Training:"},
    {"optimizer", 0, TOOL_CHOICE, AT(method), "NAME",
     "efficient-adam, adam, efficient-lamb, lamb, zero-one-adam, momentum, lion:\n"
     "what to train with: Efficient-Adam in one bit, default, 1-bit Adam,\n"
     "Efficient-Adam with LAMB's trust ratios, 1-bit LAMB, 0/1 Adam, 1-bit\n"
     "momentum SGD, or Lion in one bit", .names = optimizer_names},
    {"dense", 0, TOOL_FLAG, AT(dense), NULL,
     "its plain data-parallel form: full precision in all steps", .low = 0},
    {"compare", 0, TOOL_FLAG, AT(compare), NULL,
     "train with the dense form, again with the compressed one, and end with a\n"
     "table", .low = 0},
    {"no-error-feedback", 0, TOOL_FLAG, AT(no_error_feedback), NULL,
     "forget the rounding errors: a control that should train worse", .low = 0},
    {"steps", 0, TOOL_COUNT, AT(steps), "N", "training steps", .low = 1, .high = 1e9},
    {"batch", 0, TOOL_COUNT, AT(batch), "N",
     "samples of each rank in a micro-batch", .low = 1, .high = 65536},
    {"accumulate", 0, TOOL_COUNT, AT(accumulate), "N",
     "micro-batches in a step", .low = 1, .high = 65536},
    {"learning-rate", 0, TOOL_FLOAT, AT(learning_rate), "X",
     "its highest value; default the best of the dense form on data that serve for\n"
     "nothing else (docs/measured/trainings.md)", .high = 10},
    {"rise", 0, TOOL_COUNT, AT(rise), "N",
     "steps over which it rises from zero, to fall to a tenth at the end; default a\n"
     "tenth of the steps", .low = 1, .high = 1e9},
    {"seed", 0, TOOL_COUNT, AT(seed), "N",
     "seed of the initial parameters, the batches and the sample", .high = 1e15},
    {"zero-steps", 0, TOOL_COUNT, AT(zero_steps), "N",
     "a hard case: the first N steps have gradients of zero; default 0", .high = 1e9},
    {"hard", 0, TOOL_CHOICE, AT(hard), "none|idle|same",
     "another: rank 0 never has a gradient, or all ranks draw the same samples;\n"
     "default none", .names = hard_names},
    {"step-seconds", 0, TOOL_FLOAT, AT(step_seconds), "X",
     "what computing a gradient takes at least: a rank sleeps for the rest, as if\n"
     "another device computed; default 0", .high = 1000},
    {"link", 0, TOOL_FLOAT, AT(link), "X",
     "bandwidth in Mbit/s of a modelled link: after an exchange, a rank sleeps as\n"
     "long as its bytes would take on the link; default 0: no such link", .high = 1e6},
    {"ranks", 0, TOOL_COUNT, AT(ranks), "N",
     "ranks as threads of this process, instead of MPI's processes", .low = 1, .high = 1024},
    {.kind = TOOL_HEADING, .help = "Optimizer:"},
    {"method", 0, TOOL_CHOICE, AT(automatic), "NAME",
     "auto: the program measures an exchange and a gradient, and chooses dense, 8\n"
     "bits or one bit (onebit/method.h), for efficient-adam and efficient-lamb;\n"
     "auto-local-steps: also local steps with an outer step, where one bit would\n"
     "wait for the link, at a higher loss; default given: the other options decide",
     .names = method_names},
    {"freeze-step", 0, TOOL_CALL, 0, "N|auto",
     "number of dense steps at the start, for adam, lamb and momentum; auto (adam,\n"
     "lamb): until the variance is steady; default a fifth of the steps, for\n"
     "momentum (also with 0) 40 steps of 8 bits", .read = read_freeze_step},
    {"local-step-scaler", 0, TOOL_COUNT, AT(local_scaler), "N",
     "0/1 Adam: each time after so many steps, the ranks synchronise half as often;\n"
     "default: a tenth of the steps", .low = 1, .high = 1e9},
    {"exchange", 0, TOOL_CHOICE, AT(exchange), "momentum|step",
     "of --optimizer adam only: what one bit an element stands for; default\n"
     "momentum", .names = exchange_names},
    {"shards", 0, TOOL_CHOICE, AT(shards), "none|step|parameters",
     "of --optimizer adam only: each rank keeps the state of its share, and what\n"
     "is sent back to all; default none", .names = shards_names},
    {"beta2", 0, TOOL_FLOAT, AT(beta2), "X",
     "how slowly the variance forgets", .low = 0.1, .high = 0.999999},
    {"epsilon", 0, TOOL_FLOAT, AT(epsilon), "X",
     "added to the root of the variance: what counts as no gradient", .low = 1e-12, .high = 1},
    {"momentum", 0, TOOL_FLOAT, AT(momentum), "X",
     "of momentum SGD", .low = 0.01, .high = 0.999999},
    {"weight-decay", 0, TOOL_FLOAT, AT(weight_decay), "X", "of the matrices", .high = 10},
    {"clip-norm", 0, TOOL_FLOAT, AT(clip_norm), "X",
     "largest norm of the gradient; default 0: any", .high = 1e9},
    {"scale", 0, TOOL_CHOICE, AT(scale), "rms|mean-absolute",
     "what stands for a block; default rms", .names = scale_names},
    {"block-size", 0, TOOL_CALL, 0, "N|buffer",
     "elements that share a scale, a multiple of 32; buffer: all; default the\n"
     "library's", .read = train_read_block_size},
    {"bucket-size", 0, TOOL_COUNT, AT(bucket_size), "N",
     "exchange tensors in buckets of N elements, while the backward pass\n"
     "goes on; default 0: all at once, after it", .high = 1e15},
    {"dense-below", 0, TOOL_COUNT, AT(dense_below), "N",
     "tensors of fewer elements are never compressed; default 0: none", .high = 1e15},
    {"warmup-bits", 0, TOOL_CHOICE, AT(warmup_bits), "none|4|8",
     "bits an element of the dense steps' gradients; default none: they are\n"
     "float32", .names = warmup_bits_names},
    {"bits", 0, TOOL_CHOICE, AT(bits), "1|2|4|8",
     "bits an element of what is compressed; default 1", .names = bits_names},
    {"max-bits", 0, TOOL_CHOICE, AT(max_bits), "1|2|4|8",
     "bits that a bucket moves up to by itself, where its residual outgrows what\n"
     "is sent; default --bits", .names = bits_names},
    {.kind = TOOL_HEADING, .help = "Outer step:"},
    {"outer", 0, TOOL_COUNT, AT(outer), "N",
     "train each rank by itself, with the optimizer's dense form, and exchange\n"
     "every N steps how far the ranks have come (onebit/outer.h); by default\n"
     "the ranks exchange in every step", .low = 1, .high = 1e9},
    {"outer-rule", 0, TOOL_CHOICE, AT(outer_rule), "mean|momentum|nesterov",
     "what is done with the mean of that; default mean", .names = outer_rule_names},
    {"outer-bits", 0, TOOL_CHOICE, AT(outer_bits), "auto|1|2|4|8|32|sparse",
     "bits an element of an exchange, 32: float32, sparse: SparseLoCo's messages;\n"
     "default auto: what the rule bears", .names = outer_bits_names},
    {"outer-fragments", 0, TOOL_COUNT, AT(outer_fragments), "N",
     "parts that are exchanged at different steps; default 1", .low = 1, .high = 1e9},
    {"outer-delay", 0, TOOL_COUNT, AT(outer_delay), "N",
     "steps after which an exchange is applied, while the training goes on;\n"
     "default 0", .high = 1e9},
    {"outer-mixing", 0, TOOL_FLOAT, AT(outer_mixing), "X",
     "weight of the consensus against the rank's parameters; default 1, with a\n"
     "delay 0.5", .high = 1},
    {"outer-patience", 0, TOOL_FLOAT, AT(outer_patience), "X",
     "each rank is a site: an exchange waits X seconds for those that are late,\n"
     "goes on without them, and they are caught up; default: the ranks are\n"
     "no sites, and all are waited for", .low = 1e-3, .high = 1e6},
    {.kind = TOOL_HEADING, .help = "Precision:"},
    {"parameters", 0, TOOL_CHOICE, AT(parameters), "NAME",
     "float32, bfloat16, float16: what the model's parameters are rounded to,\n"
     "beside float32 masters; default float32: none", .names = parameters_names},
    {"gradients", 0, TOOL_CHOICE, AT(gradients), "NAME",
     "float32, bfloat16, float16: what gradients are rounded to; default float32",
     .names = parameters_names},
    {"loss-scale", 0, TOOL_FLOAT, AT(loss_scale), "X",
     "initial loss scale; it is lowered when gradients overflow, and raised when\n"
     "they do not", .low = 1, .high = 0x1p30},
    {"loss-scale-interval", 0, TOOL_COUNT, AT(loss_scale_interval), "N",
     "steps without overflow before the loss scale doubles", .low = 1, .high = 1e9},
    {.kind = TOOL_HEADING, .help = "Reports and checkpoints:"},
    {"report-every", 0, TOOL_COUNT, AT(report_every), "N",
     "steps from one line to the next", .low = 1, .high = 1e9},
    {"validate-every", 0, TOOL_COUNT, AT(validate_every), "N",
     "steps from one validation to the next; default 0: only at the end", .high = 1e9},
    {"log", 0, TOOL_TEXT, AT(log), "FILE",
     "write a line of JSON a report: step, seconds of training, bytes sent by a\n"
     "rank, training loss, and, of a step with validation, the loss of the\n"
     "held-out data; --resume goes on in it", .low = 0},
    {"json", 0, TOOL_FLAG, AT(json), NULL, "end each training with a line of JSON", .low = 0},
    {"quiet", 0, TOOL_FLAG, AT(quiet), NULL, "print nothing else", .low = 0},
    {"checkpoint", 0, TOOL_TEXT, AT(checkpoint), "DIRECTORY",
     "where to save the training", .low = 0},
    {"save-every", 0, TOOL_COUNT, AT(save_every), "N",
     "steps from one time to the next; default: only at the end", .low = 1, .high = 1e9},
    {"stop-at", 0, TOOL_COUNT, AT(stop_at), "N",
     "end after this step, before the others of --steps; --resume makes them",
     .low = 1, .high = 1e9},
    {"resume", 0, TOOL_FLAG, AT(resume), NULL, "go on from what was saved there", .low = 0},
    {.kind = TOOL_END}};
/* clang-format on */

/* --- Defaults that depend on other options, and options that exclude each other ----------------*/

static void set_default(size_t *field, size_t value) {
  if (*field == COUNT_UNSET)
    *field = value > 0 ? value : 1;
}

void train_options_complete(train_options_t *options, const float learning_rates[METHODS]) {
  const size_t steps = options->steps;
  if (options->learning_rate == REAL_UNSET)
    options->learning_rate = learning_rates[options->method] > 0.0f
                                 ? learning_rates[options->method]
                                 : learning_rates[ADAM];
  if (options->method == MOMENTUM && options->freeze == COUNT_UNSET)
    options->freeze = 0;
  set_default(&options->rise, steps / 10 + 1);
  set_default(&options->freeze, steps / 5);
  set_default(&options->local_scaler, steps / 10);
}

form_t train_options_form(const train_options_t *options) {
  return options->dense ? DENSE : options->outer ? OUTER : COMPRESSED;
}

int train_options_check(const train_options_t *options, char error[TRAIN_ERROR]) {
  const bool has_outer = options->outer_rule || options->outer_bits || options->outer_fragments ||
                         options->outer_delay || options->outer_mixing > 0.0f ||
                         options->outer_patience > 0.0f;
  const bool is_adam = options->method == ADAM, checkpoint = options->checkpoint != NULL;
  char block[24];
  snprintf(block, sizeof block, "%zu", options->block_size);
  const struct {
    bool wrong;
    const char *name, *value, *why;
  } rules[] = {
      {options->compare && options->dense, "compare", "", "makes both trainings; not with --dense"},
      {!options->outer && has_outer, "outer", "",
       "missing; the other options of the outer step need it"},
      {options->outer && (options->dense || checkpoint || options->parameters ||
                          options->loss_scale > 0.0f || options->shards),
       "outer", "", "not with dense, checkpoint, parameters, loss-scale or shards"},
      {options->automatic && (options->dense || options->outer || options->resume ||
                              options->bits || options->max_bits),
       "method", "auto", "not with dense, outer, resume, bits or max-bits"},
      {options->automatic && options->method != EFFICIENT_ADAM && options->method != EFFICIENT_LAMB,
       "method", "auto", "is for efficient-adam and efficient-lamb only"},
      {options->exchange && !is_adam, "exchange", "", "is for --optimizer adam only"},
      {options->shards && !is_adam, "shards", "", "is for --optimizer adam only"},
      {options->exchange && options->shards, "exchange", "step",
       "not with --shards, which say what is sent"},
      {options->freeze == 0 && (is_adam || options->method == LAMB), "freeze-step", "0",
       "at least one dense step is needed; auto finds it"},
      {options->freeze == FREEZE_AUTOMATIC && options->method == MOMENTUM, "freeze-step", "auto",
       "is for adam and lamb only"},
      {options->block_size != ONEBIT_BLOCK_BUFFER && options->block_size % 32 != 0, "block-size",
       block, "not a multiple of 32"},
      {options->log && options->compare, "log", options->log,
       "is for one training, but --compare makes two"},
      {checkpoint && options->compare, "checkpoint", options->checkpoint,
       "is for one training, but --compare makes two"},
      {options->resume && !checkpoint, "resume", "", "needs --checkpoint DIRECTORY"},
      {options->save_every > 0 && !checkpoint, "save-every", "", "needs --checkpoint DIRECTORY"}};
  for (size_t k = 0; k < sizeof rules / sizeof rules[0]; k++)
    if (rules[k].wrong) {
      snprintf(error, TRAIN_ERROR, "--%s%s%.300s: %s", rules[k].name, *rules[k].value ? " " : "",
               rules[k].value, rules[k].why);
      return -1;
    }
  return 0;
}

/* --- Conversion of the options -----------------------------------------------------------------*/

static const char *const forms[METHODS][FORMS] = {
    [EFFICIENT_ADAM] = {"Efficient-Adam", "dense Adam", "local Adam"},
    [ADAM] = {"1-bit Adam", "dense Adam", "local Adam"},
    [EFFICIENT_LAMB] = {"Efficient-Adam with trust ratios", "dense LAMB", "local LAMB"},
    [LAMB] = {"1-bit LAMB", "dense LAMB", "local LAMB"},
    [ZERO_ONE_ADAM] = {"0/1 Adam", "dense Adam", "local Adam"},
    [MOMENTUM] = {"1-bit SGD", "dense SGD", "local SGD"},
    [LION] = {"1-bit Lion", "dense Lion", "local Lion"},
};

const char *train_method_name(int method) { return optimizer_names[method]; }

const char *train_form_name(int method, form_t form) { return forms[method][form]; }

size_t train_last_step(const train_options_t *options) {
  const size_t stop_at = options->stop_at;
  return stop_at > 0 && stop_at < options->steps ? stop_at : options->steps;
}

/* Computes the learning rate from straight lines, without a cosine. All ranks must get the same
 * bits, and two C libraries may compute cosines with different bits. */
float train_learning_rate(const train_options_t *options, size_t step) {
  const float peak = options->learning_rate;
  const size_t rise = options->rise;
  if (step < rise)
    return peak * (float)(step + 1) / (float)rise;
  const float fall = 1.0f - 0.1f;
  return peak * (1.0f - fall * (float)(step - rise) / (float)(options->steps - rise));
}
