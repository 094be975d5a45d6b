/*
 * Profile deepspeed of 1-bit LAMB against printed numbers: a small run whose values were computed
 * with DeepSpeed's own OnebitLamb, two ranks and two tensors, copied here as data. A share ends
 * inside the second tensor, and padding follows.
 */
#include "optimizers/optimizer.h"
#include "tests/support.h"

#define ROWS    3
#define COLUMNS 4
#define FIRST   (ROWS * COLUMNS)
#define SECOND  6
#define COUNT   (FIRST + SECOND)
#define STEPS   10
#define RATE    0.01f
#define DECAY   0.01f

/* The first four parameters of both tensors; what their rate was multiplied with; the factor. */
static const struct moment {
  int step;
  double first[4], second[4], ratio[2], factor[2];
} moments[] = {
    {0,
     {-0.7446057, -0.49461, -0.2553772, -0.0053815},
     {-0.9923382, -0.5076255, 0.0076376, 0.5076256},
     {0.1701783, 0.2415243},
     {1, 1}},
    {3,
     {-0.726145, -0.5069437, -0.2426984, -0.0264583},
     {-0.9669251, -0.5371531, 0.0235876, 0.51287},
     {0.2523899, 0.28073},
     {1, 1}},
    {4,
     {-0.7253155, -0.5077632, -0.2416766, -0.025596},
     {-0.9658026, -0.5359891, 0.0250635, 0.5115572},
     {0.0776104, 0.0850978},
     {0.9950033, 1.0000769}},
    {9,
     {-0.7216897, -0.5065414, -0.2457411, -0.0268547},
     {-0.9623883, -0.5363703, 0.026201, 0.5162705},
     {0.0666715, 0.0532888},
     {0.8547606, 0.6262545}},
};
static const double coefficient[2] = {0.0780002, 0.0850913}, scaling[2] = {0.7447777, 1.5213347};
static const double last_padding = -0.0069073;

/* The numbers are printed with seven digits after the point. */
static void check_near(const char *what, int step, int i, double got, double wanted) {
  CHECK(fabs(got - wanted) <= 1e-6, "step %d: %s %d is %.7f, not %.7f", step, what, i, got, wanted);
}

static void fill_gradients(float *gradient, int step, int rank) {
  for (int i = 0; i < FIRST; i++)
    gradient[i] = (float)((7 * i + 3 * step + 5 * rank) % 11 - 5) / 8.0f;
  for (int i = 0; i < SECOND; i++)
    gradient[FIRST + i] = (float)((5 * i + 2 * step + 3 * rank) % 13 - 6) / 32.0f;
}

static void fill_parameters(float *parameter) {
  for (int i = 0; i < FIRST; i++)
    parameter[i] = (float)((3 * (i / COLUMNS) + i % COLUMNS) % 7 - 3) / 4.0f;
  for (int i = 0; i < SECOND; i++)
    parameter[FIRST + i] = (float)(i % 5 - 2) / 2.0f;
}

/* The piece of tensor t in the only bucket. */
static size_t piece_of(const struct ob_bucket *bucket, size_t t) {
  size_t k = 0;
  while (bucket->tensor_of[k] != t)
    k++;
  return k;
}

static void check_moment(onebit_optimizer_t optimizer, int step, const float *parameter) {
  const struct ob_lamb *lamb = optimizer->own;
  const struct ob_bucket *bucket = &optimizer->buckets[0];
  for (size_t k = 0; k < sizeof moments / sizeof moments[0]; k++) {
    if (moments[k].step != step)
      continue;
    for (int i = 0; i < 4; i++) {
      check_near("parameter of the first", step, i, (double)parameter[i], moments[k].first[i]);
      check_near("parameter of the second", step, i, (double)parameter[FIRST + i],
                 moments[k].second[i]);
    }
    for (size_t t = 0; t < 2; t++) {
      double ratio = (double)(bucket->learning_rates[piece_of(bucket, t)] / RATE);
      check_near("ratio", step, (int)t, ratio, moments[k].ratio[t]);
      check_near("factor", step, (int)t, lamb->factors[t], moments[k].factor[t]);
    }
  }
}

/* The momentum that came with the last message for the padding: all of it in the last share. */
static double padding_of(const struct ob_bucket *bucket) {
  struct ob_message_shape shape = ob_plan_message(bucket->bits, 1, 0);
  struct ob_view view = ob_message_view(ob_plan_result(bucket->bits, false, 1, 0), &shape);
  const struct ob_piece *last =
      &ob_plan_layout(bucket->bits)->piece[ob_plan_layout(bucket->bits)->pieces - 1];
  size_t word = last->first_word - ob_layout_word(ob_plan_layout(bucket->bits), shape.first);
  CHECK(bucket->tensor_of[ob_plan_layout(bucket->bits)->pieces - 1] == 2 &&
            last->count == 32 - COUNT,
        "the last piece is no padding");
  CHECK(view.words[word] == 0 || view.words[word] == (1u << last->count) - 1,
        "the padding's signs are %x", (unsigned)view.words[word]);
  return (double)(view.words[word] ? -view.header->scale : view.header->scale);
}

static void check_end(onebit_optimizer_t optimizer) {
  const struct ob_lamb *lamb = optimizer->own;
  const struct ob_bucket *bucket = &optimizer->buckets[0];
  for (size_t t = 0; t < 2; t++) {
    check_near("coefficient", STEPS, (int)t, lamb->coefficients[t], coefficient[t]);
    check_near("scaling", STEPS, (int)t, (double)bucket->scalings[piece_of(bucket, t)], scaling[t]);
  }
  check_near("padding", STEPS, 0, padding_of(bucket), last_padding);
}

static void ten_steps(onebit_comm_t comm, void *context) {
  float parameter[COUNT], gradient[COUNT];
  onebit_tensor_t tensors[2] = {{parameter, gradient, FIRST, DECAY, 0, 0},
                                {parameter + FIRST, gradient + FIRST, SECOND, DECAY, 0, 0}};
  onebit_optimizer_t optimizer;
  (void)context;
  onebit_lamb_options_t options = {
      .size = sizeof options, .common.profile = ONEBIT_PROFILE_DEEPSPEED, .freeze_step = 5};
  fill_parameters(parameter);
  if (!CHECK_STATUS(onebit_lamb_create(comm, tensors, 2, &options, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < STEPS; step++) {
    fill_gradients(gradient, step, onebit_comm_rank(comm));
    CHECK_STATUS(onebit_optimizer_step(optimizer, RATE), ONEBIT_OK);
    check_moment(optimizer, step, parameter);
  }
  check_end(optimizer);
  onebit_optimizer_destroy(optimizer);
}

Test(deepspeed_lamb, gives_the_printed_numbers) { on_ranks(2, ten_steps, NULL); }
