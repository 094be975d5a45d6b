/*
 * The options of the training programs. They share the options for the optimizer, the learning-rate
 * schedule, reports and checkpoints. Each program has its own table of options for its data and
 * model.
 */
#ifndef EXAMPLES_TRAIN_OPTIONS_H
#define EXAMPLES_TRAIN_OPTIONS_H

#include "tools/options.h"

/* --optimizer */
typedef enum method {
  EFFICIENT_ADAM,
  ADAM,
  EFFICIENT_LAMB,
  LAMB,
  ZERO_ONE_ADAM,
  MOMENTUM,
  LION,
  METHODS
} method_t;

/* The form of an optimizer: compressed; dense, with uncompressed exchanges; or on each rank alone,
 * with outer steps (--outer). */
typedef enum form { COMPRESSED, DENSE, OUTER, FORMS } form_t;

#define FREEZE_AUTOMATIC ((size_t)-3) /* --freeze-step auto */

enum { HARD_NONE, HARD_IDLE, HARD_SAME }; /* --hard */

enum { MOST_PATHS = 64, TRAIN_ERROR = 1100 /* bytes of a message */ };

typedef struct paths {
  const char *path[MOST_PATHS];
  size_t count;
} paths_t;

/* Default values that mean "not set". train_options_complete replaces them by values that depend on
 * other options. */
#define COUNT_UNSET ((size_t)-2)
#define REAL_UNSET  (-1.0f)

/* The options of all training programs. */
typedef struct train_options {
  int method;    /* a method_t */
  int automatic; /* --method: 1: auto, 2: auto-local-steps; warmup, outer, form have the choice */
  size_t warmup; /* the number of Efficient-Adam's warm-up steps; 0: the library's default */
  bool dense, compare;
  bool no_error_feedback;
  size_t steps, seed;
  size_t batch;      /* samples per rank and micro-batch */
  size_t accumulate; /* micro-batches per step */
  int hard;
  size_t zero_steps;
  float step_seconds; /* the minimum duration of a step's computation in seconds */
  float link;         /* the data rate of a simulated link in Mbit/s; 0: no link is simulated */

  float learning_rate; /* the highest learning rate of the schedule */
  size_t rise;         /* the number of steps in which the rate rises to learning_rate */

  size_t freeze;       /* the number of dense steps at the beginning, or FREEZE_AUTOMATIC */
  size_t local_scaler; /* 0/1 Adam's option local_step_scaler */
  float beta2, epsilon, momentum, weight_decay, clip_norm;
  int exchange;                                /* an onebit_adam_exchange_t minus 1 */
  int shards;                                  /* an onebit_shards_t */
  int scale;                                   /* an onebit_scale_t */
  size_t block_size, bucket_size, dense_below; /* as in onebit_optimizer_options_t */
  int warmup_bits;                             /* 0: dense, 1: 4 bits, 2: 8 bits */
  int bits, max_bits;                          /* binary logarithms of the numbers; max_bits 0: the
                                                * same as bits */
  size_t outer;                                /* local steps between exchanges; 0: no --outer */
  int outer_rule;                              /* an onebit_outer_rule_t */
  int outer_bits;                              /* index of the choice in --outer-bits */
  float outer_mixing;
  float outer_patience; /* in seconds; 0: ranks are not sites */
  size_t outer_fragments, outer_delay;
  int parameters, gradients; /* onebit_dtype_t */
  float loss_scale;
  size_t loss_scale_interval;

  const char *checkpoint; /* a directory; NULL: none */
  size_t save_every, stop_at;
  bool resume;

  size_t report_every, validate_every; /* numbers of steps; validate_every 0: only at the end */
  const char *log;                     /* a file; NULL: none */
  bool json, quiet;
  size_t ranks; /* the number of ranks as threads of this process; 0: ranks are MPI processes */

  /* Options of one or two programs. */
  paths_t data; /* for train_text and train_words */
  size_t width, context;
  size_t layers, heads; /* for train_text */
  int init;
  size_t vocabulary; /* for train_words */
  bool no_table;
  const char *images, *labels; /* for train_images; NULL: drawn digits */
  size_t drawn, side;          /* the number of drawn digits, and pixels per side */
  size_t channels, hidden;
  size_t held_out; /* the number of held-out images (0: a fifth), or of held-out bytes of text to
                    * use (0: all) */
} train_options_t;

/* Defaults that all programs share. A program adds its own in its initialiser. */
#define TRAIN_OPTIONS_DEFAULTS                                                                     \
  .seed = 1, .accumulate = 1, .learning_rate = REAL_UNSET, .rise = COUNT_UNSET,                    \
  .freeze = COUNT_UNSET, .local_scaler = COUNT_UNSET, .beta2 = 0.99f, .momentum = 0.9f,            \
  .loss_scale_interval = 2000, .report_every = 20

/* train_rows: the options that every program's table has after its own rows. train_read_path reads
 * one path of --data. */
extern const struct tool_option train_rows[];
tool_read train_read_path;

/* Checks that --data was given. Returns 0, or -1 with an error message. */
int train_check_text(const train_options_t *options, char error[TRAIN_ERROR]);

/* Sets the defaults that depend on other options. learning_rates[m] is the program's learning rate
 * for method m; 0 stands for Adam's rate. */
void train_options_complete(train_options_t *options, const float learning_rates[METHODS]);

/* Checks that the options are compatible. Returns 0, or -1 with an error message. */
int train_options_check(const train_options_t *options, char error[TRAIN_ERROR]);

/* Returns the optimizer's form, for a single training. --compare makes two trainings, with two
 * forms. */
form_t train_options_form(const train_options_t *options);

/* Returns the name of an optimizer's form: "1-bit Adam", "dense Adam" or "local Adam". */
const char *train_form_name(int method, form_t form);
const char *train_method_name(int method); /* the name in --optimizer */

/* Returns the number of steps after which the training ends: the value of --stop-at, if given, or
 * else of --steps. */
size_t train_last_step(const train_options_t *options);

/* Returns the learning rate of a step, counted from 0. It has the same bits on all ranks. */
float train_learning_rate(const train_options_t *options, size_t step);

#endif
