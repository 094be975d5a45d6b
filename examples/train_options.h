/*
 * The options of the trainings. All trainings share those for the optimizer, the schedule of
 * learning rates, reports and checkpoints. Each program has options for its data and model in its
 * own table.
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

/* The exchange of gradients: compressed by the method, dense by the same optimizer, or none at all
 * (--outer). */
typedef enum form { COMPRESSED, DENSE, OUTER, FORMS } form_t;

#define FREEZE_AUTOMATIC ((size_t)-3) /* --freeze-step auto */

enum { HARD_NONE, HARD_IDLE, HARD_SAME }; /* --hard */

enum { MOST_PATHS = 64, TRAIN_ERROR = 1100 /* bytes of a message */ };

typedef struct paths {
  const char *path[MOST_PATHS];
  size_t count;
} paths_t;

/* Defaults that stand for a value which is later determined from the other options. */
#define COUNT_UNSET ((size_t)-2)
#define REAL_UNSET  (-1.0f)

/* The options of all trainings. */
typedef struct train_options {
  int method;    /* a method_t */
  int automatic; /* --method auto; the chosen method is in warmup, outer and the form */
  size_t warmup; /* the number of steps of Efficient-Adam's warm-up; 0: the library's default */
  bool dense, compare;
  bool no_error_feedback;
  size_t steps, seed;
  size_t batch;      /* samples of a rank in a micro-batch */
  size_t accumulate; /* micro-batches in a step */
  int hard;
  size_t zero_steps;
  float step_seconds; /* the least seconds of a step's computation */
  float link;         /* the rate of a simulated link in Mbit/s; 0: none */

  float learning_rate; /* the maximum of the schedule */
  size_t rise;         /* the steps in which the rate rises to the maximum */

  size_t freeze;       /* number of dense steps at the beginning, or FREEZE_AUTOMATIC */
  size_t local_scaler; /* the interval of 0/1 Adam's local scaler */
  float beta2, epsilon, momentum, weight_decay, clip_norm;
  int exchange;                                /* an onebit_adam_exchange_t, less 1 */
  int shards;                                  /* an onebit_shards_t */
  int scale;                                   /* an onebit_scale_t */
  size_t block_size, bucket_size, dense_below; /* as in onebit_optimizer_options_t */
  int warmup_bits;                             /* 0: dense, 1: 4 bits, 2: 8 bits */
  int bits, max_bits;                          /* binary logarithms; max_bits 0: as bits */
  size_t outer;                                /* local steps; 0: none */
  int outer_rule;                              /* an onebit_outer_rule_t */
  int outer_bits;                              /* index of the choice in --outer-bits */
  float outer_mixing;
  float outer_patience; /* seconds; 0: ranks are not sites */
  size_t outer_fragments, outer_delay;
  int parameters, gradients; /* onebit_dtype_t */
  float loss_scale;
  size_t loss_scale_interval;

  const char *checkpoint; /* a directory; NULL: none */
  size_t save_every, stop_at;
  bool resume;

  size_t report_every, validate_every; /* steps; validate_every 0: only at the end */
  const char *log;                     /* a file; NULL: none */
  bool json, quiet;
  size_t ranks; /* threads of this process; 0: the processes of MPI */

  /* Options of one or two programs. */
  paths_t data; /* of train_text and train_words */
  size_t width, context;
  size_t layers, heads; /* of train_text */
  int init;
  size_t vocabulary; /* of train_words */
  bool no_table;
  const char *images, *labels; /* of train_images; NULL: drawn digits */
  size_t drawn, side;          /* drawn digits: their number, and pixels a side */
  size_t channels, hidden;
  size_t held_out; /* held-out images, 0: a fifth; held-out bytes of text, 0: all */
} train_options_t;

/* Defaults that all programs share. A program adds its own in its initialiser. */
#define TRAIN_OPTIONS_DEFAULTS                                                                     \
  .seed = 1, .accumulate = 1, .learning_rate = REAL_UNSET, .rise = COUNT_UNSET,                    \
  .freeze = COUNT_UNSET, .local_scaler = COUNT_UNSET, .beta2 = 0.99f, .momentum = 0.9f,            \
  .loss_scale_interval = 2000, .report_every = 20

/* The rows that all programs have after their own rows, and the function that reads a path of
 * --data. */
extern const struct tool_option train_rows[];
tool_read train_read_path;

/* Checks that --data was given. Returns 0, or -1 with an error message. */
int train_check_text(const train_options_t *options, char error[TRAIN_ERROR]);

/* Sets the defaults that depend on other options. learning_rates has the program's learning rate
 * for each method; 0 stands for Adam's rate. */
void train_options_complete(train_options_t *options, const float learning_rates[METHODS]);

/* Checks that the options are compatible. Returns 0, or -1 with an error message. */
int train_options_check(const train_options_t *options, char error[TRAIN_ERROR]);

/* Returns the form of a single training; --compare makes two trainings. */
form_t train_options_form(const train_options_t *options);

/* Returns "1-bit Adam", "dense Adam", "local Adam". */
const char *train_form_name(int method, form_t form);
const char *train_method_name(int method); /* the name in --optimizer */

/* Returns the number of steps after which the training ends: --steps, or --stop-at. */
size_t train_last_step(const train_options_t *options);

/* Returns the learning rate of a step, counted from 0. It has the same bits on all ranks. */
float train_learning_rate(const train_options_t *options, size_t step);

#endif
