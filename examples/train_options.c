/* The options of train_options.h. */
#include "examples/train_options.h"

#include <math.h>
#include <stdio.h>

#include "onebit/onebit.h"

#define AT(field) offsetof(train_options_t, field)

/* --- Tables. The upper limits only keep products of sizes within a size_t. ---------------------*/

static const option_t training[] = {
    {"optimizer", OPTION_CHOICE, AT(method), 0, 0,
     "efficient-adam|adam|efficient-lamb|lamb|zero-one-adam|momentum|lion", 0,
     "what to train with: Efficient-Adam in one bit, default, 1-bit Adam, Efficient-Adam with "
     "LAMB's "
     "trust ratios, 1-bit LAMB, 0/1 Adam, 1-bit momentum SGD, or Lion in one bit"},
    {"dense", OPTION_FLAG, AT(dense), 0, 0, NULL, 0,
     "its plain data-parallel form: full precision in all steps"},
    {"compare", OPTION_FLAG, AT(compare), 0, 0, NULL, 0,
     "train with the dense form, again with the compressed one, and end with a table"},
    {"no-error-feedback", OPTION_FLAG, AT(no_error_feedback), 0, 0, NULL, 0,
     "forget the rounding errors: a control that should train worse"},
    {"steps", OPTION_COUNT, AT(steps), 1, 1e9, NULL, 0, "training steps"},
    {"batch", OPTION_COUNT, AT(batch), 1, 65536, NULL, 0, "samples of each rank in a micro-batch"},
    {"accumulate", OPTION_COUNT, AT(accumulate), 1, 65536, NULL, 0, "micro-batches in a step"},
    {"learning-rate", OPTION_REAL, AT(learning_rate), 0, 10, NULL, 0,
     "its highest value; default the best of the dense form on data that serve for nothing else "
     "(docs/measured/rates.md)"},
    {"rise", OPTION_COUNT, AT(rise), 1, 1e9, NULL, 0,
     "steps over which it rises from zero; default a tenth of the steps"},
    {"decay", OPTION_CHOICE, AT(decay), 0, 0, "linear|inverse-root|none", 0,
     "how it falls after that; default linear"},
    {"last-rate", OPTION_REAL, AT(last_rate), 0, 1, NULL, 0,
     "where the linear fall ends, as a part of the highest value"},
    {"seed", OPTION_COUNT, AT(seed), 0, 1e15, NULL, 0,
     "of the first parameters, the batches, the sample"},
    {"zero-steps", OPTION_COUNT, AT(zero_steps), 0, 1e9, NULL, 0,
     "a hard case: so many steps at first have gradients of zero; default 0"},
    {"hard", OPTION_CHOICE, AT(hard), 0, 0, "none|idle|same", 0,
     "another: rank 0 never has a gradient, or all ranks draw the same samples; default none"},
    {"step-seconds", OPTION_REAL, AT(step_seconds), 0, 1000, NULL, 0,
     "what computing a gradient takes at least: a rank sleeps for the rest, as if another device "
     "computed; default 0"},
    {"link", OPTION_REAL, AT(link), 0, 1e6, NULL, 0,
     "Mbit/s of a link that is modelled: after an exchange a rank sleeps as long as the bytes that "
     "it has sent take on it; default 0: none"},
    {"ranks", OPTION_COUNT, AT(ranks), 1, 1024, NULL, 0,
     "ranks as threads of this process, instead of MPI's processes"},
};

static const option_t optimizer[] = {
    {"freeze-step", OPTION_COUNT, AT(freeze), 0, 1e9, "auto", FREEZE_AUTOMATIC,
     "of adam, lamb and momentum only: dense steps at first; auto, of the first two: until the "
     "variance is steady; default a fifth of the steps, of momentum 0"},
    {"variance-freeze-step", OPTION_COUNT, AT(variance_freeze), 1, 1e9, NULL, 0,
     "0/1 Adam: steps with a variance that lives; default half of the steps"},
    {"variance-update-scaler", OPTION_COUNT, AT(variance_scaler), 1, 1e9, NULL, 0,
     "0/1 Adam: updates of the variance after which they become half as frequent; default a "
     "hundredth of the steps"},
    {"local-step-scaler", OPTION_COUNT, AT(local_scaler), 1, 1e9, NULL, 0,
     "0/1 Adam: steps after which the ranks synchronise half as often; default a tenth of the "
     "steps"},
    {"local-step-clipper", OPTION_COUNT, AT(local_clipper), 1, 1e9, NULL, 0,
     "0/1 Adam: most steps from one synchronisation to the next; default 4"},
    {"exchange", OPTION_CHOICE, AT(exchange), 0, 0, "momentum|step", 0,
     "of --optimizer adam only: what one bit an element stands for; default momentum"},
    {"shards", OPTION_CHOICE, AT(shards), 0, 0, "none|step|parameters", 0,
     "of --optimizer adam only: each rank keeps the state of its share, and what is sent back to "
     "all; default none"},
    {"beta2", OPTION_REAL, AT(beta2), 0.1, 0.999999, NULL, 0, "how slowly the variance forgets"},
    {"epsilon", OPTION_REAL, AT(epsilon), 1e-12, 1, NULL, 0,
     "added to the root of the variance: what counts as no gradient"},
    {"gain", OPTION_REAL, AT(gain), 0, 1e6, NULL, 0,
     "efficient-adam: what normalised gradients are multiplied by; default 1"},
    {"momentum", OPTION_REAL, AT(momentum), 0.01, 0.999999, NULL, 0, "of momentum SGD"},
    {"weight-decay", OPTION_REAL, AT(weight_decay), 0, 10, NULL, 0, "of the matrices"},
    {"clip-norm", OPTION_REAL, AT(clip_norm), 0, 1e9, NULL, 0,
     "largest norm of the gradient; default 0: any"},
    {"scale", OPTION_CHOICE, AT(scale), 0, 0, "rms|mean-absolute", 0,
     "what stands for a block; default rms"},
    {"block-size", OPTION_COUNT, AT(block_size), 32, 65536, "buffer", ONEBIT_BLOCK_BUFFER,
     "elements that share a scale, a multiple of 32; buffer: all; default the library's"},
    {"bucket-size", OPTION_COUNT, AT(bucket_size), 0, 1e15, NULL, 0,
     "exchange tensors in buckets of so many elements, while the backward pass goes on; default 0: "
     "all at once, after it"},
    {"dense-below", OPTION_COUNT, AT(dense_below), 0, 1e15, NULL, 0,
     "tensors of fewer elements are never compressed; default 0: none"},
    {"warmup-bits", OPTION_CHOICE, AT(warmup_bits), 0, 0, "none|4|8", 0,
     "bits an element of the dense steps' gradients; default none: they are float32"},
    {"bits", OPTION_CHOICE, AT(bits), 0, 0, "1|2|4|8", 0,
     "bits an element of what is compressed; default 1"},
    {"max-bits", OPTION_CHOICE, AT(max_bits), 0, 0, "1|2|4|8", 0,
     "bits that a bucket moves up to by itself, where its residual outgrows what is sent; default "
     "--bits"},
};

static const option_t outer[] = {
    {"outer", OPTION_COUNT, AT(outer), 1, 1e9, NULL, 0,
     "train each rank by itself, with the optimizer's dense form, and exchange every so many steps "
     "how far the ranks have come (onebit/outer.h); by default the ranks exchange in every step"},
    {"outer-rule", OPTION_CHOICE, AT(outer_rule), 0, 0, "mean|momentum|nesterov", 0,
     "what is done with the mean of that; default mean"},
    {"outer-bits", OPTION_CHOICE, AT(outer_bits), 0, 0, "auto|1|2|4|8|32|sparse", 0,
     "bits an element of an exchange, 32: float32, sparse: SparseLoCo's messages; default auto: "
     "what the rule bears"},
    {"outer-rate", OPTION_REAL, AT(outer_rate), 0, 10, NULL, 0,
     "learning rate of the outer rule; default 1, of nesterov 0.7"},
    {"outer-momentum", OPTION_REAL, AT(outer_momentum), 0, 0.999999, NULL, 0,
     "its momentum; default 0.5, of nesterov 0.9"},
    {"outer-fragments", OPTION_COUNT, AT(outer_fragments), 1, 1e9, NULL, 0,
     "parts that are exchanged at different steps; default 1"},
    {"outer-delay", OPTION_COUNT, AT(outer_delay), 0, 1e9, NULL, 0,
     "steps after which an exchange is applied, while the training goes on; default 0"},
    {"outer-mixing", OPTION_REAL, AT(outer_mixing), 0, 1, NULL, 0,
     "weight of the consensus against the rank's parameters; default 1, with a delay 0.5"},
    {"outer-patience", OPTION_REAL, AT(outer_patience), 1e-3, 1e6, NULL, 0,
     "each rank is a site: an exchange waits so many seconds for those that are late, goes on "
     "without them, and they are caught up; default: the ranks are no sites, and all are waited "
     "for"},
};

static const option_t numbers[] = {
    {"parameters", OPTION_CHOICE, AT(parameters), 0, 0, "float32|bfloat16|float16", 0,
     "what the model's parameters are rounded to, beside float32 masters; default float32: none"},
    {"gradients", OPTION_CHOICE, AT(gradients), 0, 0, "float32|bfloat16|float16", 0,
     "what gradients are rounded to; default float32"},
    {"loss-scale", OPTION_REAL, AT(loss_scale), 1, 0x1p30, NULL, 0,
     "first factor of the loss; it falls and rises with what the gradients can hold"},
    {"loss-scale-interval", OPTION_COUNT, AT(loss_scale_interval), 1, 1e9, NULL, 0,
     "good steps before it doubles"},
};

static const option_t reports[] = {
    {"report-every", OPTION_COUNT, AT(report_every), 1, 1e9, NULL, 0,
     "steps from one line to the next"},
    {"validate-every", OPTION_COUNT, AT(validate_every), 0, 1e9, NULL, 0,
     "steps from one validation to the next; default 0: only at the end"},
    {"log", OPTION_PATH, AT(log), 0, 0, "FILE", 0,
     "write a line of JSON a report: step, seconds of training, bytes sent by a rank, training "
     "loss, and, of a step with validation, the loss of the held-out data; --resume goes on in it"},
    {"json", OPTION_FLAG, AT(json), 0, 0, NULL, 0, "end each training with a line of JSON"},
    {"quiet", OPTION_FLAG, AT(quiet), 0, 0, NULL, 0, "print nothing else"},
    {"checkpoint", OPTION_PATH, AT(checkpoint), 0, 0, "DIRECTORY", 0, "where to save the training"},
    {"save-every", OPTION_COUNT, AT(save_every), 1, 1e9, NULL, 0,
     "steps from one time to the next; default: only at the end"},
    {"stop-at", OPTION_COUNT, AT(stop_at), 1, 1e9, NULL, 0,
     "end after this step, before the others of --steps; --resume makes them"},
    {"resume", OPTION_FLAG, AT(resume), 0, 0, NULL, 0, "go on from what was saved there"},
    {"help", OPTION_FLAG, AT(help), 0, 0, NULL, 0, "print this and stop"},
    {"version", OPTION_FLAG, AT(version), 0, 0, NULL, 0,
     "print the version of the library and stop"},
};

const option_table_t train_training_table = OPTION_TABLE("Training", training);
const option_table_t train_optimizer_table = OPTION_TABLE("Optimizer", optimizer);
const option_table_t train_outer_table = OPTION_TABLE("Outer step", outer);
const option_table_t train_precision_table = OPTION_TABLE("Precision", numbers);
const option_table_t train_reports_table = OPTION_TABLE("Reports and checkpoints", reports);

/* --- Defaults that depend on others, and options that do not go together -----------------------*/

static void complete(size_t *field, size_t value) {
  if (*field == COUNT_UNSET)
    *field = value > 0 ? value : 1;
}

void train_options_complete(train_options_t *options, const float learning_rates[METHODS]) {
  const size_t steps = options->steps;
  options->help |= options->version;
  if (options->learning_rate == REAL_UNSET)
    options->learning_rate = learning_rates[options->method] > 0.0f
                                 ? learning_rates[options->method]
                                 : learning_rates[ADAM];
  if (options->method == MOMENTUM && options->freeze == COUNT_UNSET)
    options->freeze = 0;
  complete(&options->rise, steps / 10 + 1);
  complete(&options->freeze, steps / 5);
  complete(&options->variance_freeze, steps / 2);
  complete(&options->variance_scaler, steps / 100);
  complete(&options->local_scaler, steps / 10);
  complete(&options->local_clipper, 4);
}

form_t train_options_form(const train_options_t *options) {
  return options->dense ? DENSE : options->outer ? OUTER : COMPRESSED;
}

static int check_form(const train_options_t *options, char *words) {
  if (!options->compare || !options->dense)
    return 0;
  snprintf(words, OPTION_WORDS, "--compare: makes both trainings; not with --dense");
  return -1;
}

static int check_outer(const train_options_t *options, char *words) {
  const int has_more = options->outer_rule || options->outer_bits || options->outer_rate > 0.0f ||
                       options->outer_momentum > 0.0f || options->outer_fragments ||
                       options->outer_delay || options->outer_mixing > 0.0f ||
                       options->outer_patience > 0.0f;
  if (!options->outer && has_more)
    snprintf(words, OPTION_WORDS, "--outer: missing; the other options of the outer step need it");
  else if (options->outer && (options->dense || options->checkpoint || options->parameters ||
                              options->loss_scale > 0.0f || options->shards))
    snprintf(words, OPTION_WORDS,
             "--outer: not with dense, checkpoint, parameters, loss-scale or shards");
  else
    return 0;
  return -1;
}

static int check_method(const train_options_t *options, char *words) {
  if (options->method != ADAM && (options->exchange || options->shards))
    snprintf(words, OPTION_WORDS, "--%s: is for --optimizer adam only",
             options->exchange ? "exchange" : "shards");
  else if (options->method == ADAM && options->exchange && options->shards)
    snprintf(words, OPTION_WORDS, "--exchange step: not with --shards, which say what is sent");
  else if (options->freeze == 0 && (options->method == ADAM || options->method == LAMB))
    snprintf(words, OPTION_WORDS,
             "--freeze-step 0: at least one dense step is needed; auto finds it");
  else if (options->freeze == FREEZE_AUTOMATIC && options->method == MOMENTUM)
    snprintf(words, OPTION_WORDS, "--freeze-step auto: is for adam and lamb only");
  else if (options->block_size != ONEBIT_BLOCK_BUFFER && options->block_size % 32 != 0)
    snprintf(words, OPTION_WORDS, "--block-size %zu: not a multiple of 32", options->block_size);
  else
    return 0;
  return -1;
}

static int check_files(const train_options_t *options, char *words) {
  if (options->log && options->compare)
    snprintf(words, OPTION_WORDS, "--log %.300s: is for one training, but --compare makes two",
             options->log);
  else if (options->checkpoint && options->compare)
    snprintf(words, OPTION_WORDS,
             "--checkpoint %.300s: is for one training, but --compare makes two",
             options->checkpoint);
  else if (!options->checkpoint && (options->save_every > 0 || options->resume))
    snprintf(words, OPTION_WORDS, "--%s: needs --checkpoint DIRECTORY",
             options->resume ? "resume" : "save-every");
  else
    return 0;
  return -1;
}

int train_options_check(const train_options_t *options, char words[OPTION_WORDS]) {
  if (options->help)
    return 0;
  if (check_form(options, words) != 0 || check_outer(options, words) != 0 ||
      check_method(options, words) != 0)
    return -1;
  return check_files(options, words);
}

/* --- What the options mean ---------------------------------------------------------------------*/

static const struct {
  const char *name, *forms[FORMS]; /* the name is that of --optimizer */
} methods[METHODS] = {
    [EFFICIENT_ADAM] = {"efficient-adam", {"Efficient-Adam", "dense Adam", "local Adam"}},
    [ADAM] = {"adam", {"1-bit Adam", "dense Adam", "local Adam"}},
    [EFFICIENT_LAMB] = {"efficient-lamb",
                        {"Efficient-Adam with trust ratios", "dense LAMB", "local LAMB"}},
    [LAMB] = {"lamb", {"1-bit LAMB", "dense LAMB", "local LAMB"}},
    [ZERO_ONE_ADAM] = {"zero-one-adam", {"0/1 Adam", "dense Adam", "local Adam"}},
    [MOMENTUM] = {"momentum", {"1-bit SGD", "dense SGD", "local SGD"}},
    [LION] = {"lion", {"1-bit Lion", "dense Lion", "local Lion"}},
};

const char *train_method_name(int method) { return methods[method].name; }

const char *train_form_name(int method, form_t form) { return methods[method].forms[form]; }

size_t train_last_step(const train_options_t *options) {
  const size_t stop_at = options->stop_at;
  return stop_at > 0 && stop_at < options->steps ? stop_at : options->steps;
}

/* Computes the rate from lines and a square root, no cosine: all ranks must find the same bits,
 * which two C libraries might not give. */
float train_learning_rate(const train_options_t *options, size_t step) {
  const float peak = options->learning_rate;
  const size_t rise = options->rise;
  if (step < rise)
    return peak * (float)(step + 1) / (float)rise;
  if (options->decay == DECAY_NONE)
    return peak;
  if (options->decay == DECAY_INVERSE_ROOT)
    return peak * sqrtf((float)rise / (float)(step + 1));
  const float fall = 1.0f - options->last_rate;
  return peak * (1.0f - fall * (float)(step - rise) / (float)(options->steps - rise));
}
