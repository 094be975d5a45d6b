/* The table of cases of the collectives. */
#include "collectives/schedules/schedule.h"
#include "tests/support_collectives.h"

#define BLOCK_SIZES 5
static const size_t block_sizes[BLOCK_SIZES] = {2048, 32, 256, 65536, ONEBIT_BLOCK_BUFFER};
static const size_t chunk_sizes[] = {0, 32, 4096, 0, 2048};
/* Groups of at least this many ranks have no chunks of one word, which would need hundreds of
 * thousands of messages. */
#define MANY_RANKS 5
#define SCALES     2
#define DTYPES     3

/* Returns a number below `limit` that depends only on the case's number and on `what` (Knuth's
 * multiplicative hash). It spreads options that are not combined with all others evenly over the
 * cases. */
static size_t draw_number(size_t number, size_t what, size_t limit) {
  uint32_t hash = (uint32_t)(number * 8 + what) * 2654435761u;
  return (hash >> 16) % limit;
}

struct table {
  struct collective_case *cases;
  size_t count, capacity;
  int size;
};

static struct collective_case *add_case(struct table *table, onebit_operation_t operation,
                                        size_t count) {
  if (table->count == table->capacity) {
    table->capacity = 2 * table->capacity + 64;
    struct collective_case *grown = realloc(table->cases, table->capacity * sizeof *table->cases);
    if (!grown)
      abort();
    table->cases = grown;
  }
  size_t number = table->count++;
  struct collective_case *what = &table->cases[number];
  *what = (struct collective_case){.size = table->size,
                                   .hosts = 1,
                                   .steps = count > 1000 ? 3 : 5,
                                   .count = count,
                                   .options = EXCHANGE_OPTIONS_INIT};
  what->options.operation = operation;
  what->options.chunk_size =
      chunk_sizes[draw_number(number, 0, sizeof chunk_sizes / sizeof chunk_sizes[0])];
  if (table->size >= MANY_RANKS && what->options.chunk_size == 32)
    what->options.chunk_size = 1024;
  what->options.dtype = (onebit_dtype_t)draw_number(number, 1, DTYPES);
  /* Larger groups have one thread per rank: more threads than cores would only make the test
   * slow. */
  what->options.threads = table->size <= 2 ? 1 + (int)draw_number(number, 2, 3) : 1;
  what->placement = (enum placement)draw_number(number, 3, PLACEMENTS);
  what->nonblocking = draw_number(number, 4, 2);
  return what;
}

/* Adds a case with combination number k of block size and scale, and of dtype if all dtypes are
 * wanted. */
static void add_combination(struct table *table, onebit_operation_t operation, size_t count,
                            size_t k, bool every_dtype) {
  struct collective_case *what = add_case(table, operation, count);
  what->options.block_size = block_sizes[k % BLOCK_SIZES];
  what->options.scale = (onebit_scale_t)(k / BLOCK_SIZES % SCALES);
  if (every_dtype)
    what->options.dtype = (onebit_dtype_t)(k / (BLOCK_SIZES * SCALES) % DTYPES);
}

static size_t count_combinations(int size, enum extent extent, size_t count) {
  bool large = count > 10000;
  if (extent == FEW)
    return large ? 1 : 3;
  if (large)
    return size < MANY_RANKS ? 5 : 2;
  if (size >= MANY_RANKS && count > 1000)
    return BLOCK_SIZES;
  return extent == EVERY_OPTION ? BLOCK_SIZES * SCALES * DTYPES : BLOCK_SIZES * SCALES;
}

/* Gives a case more than one bit per element. The cases take the widths in turn, and the block
 * sizes and scales that such messages can have. */
static void set_width(struct collective_case *what, size_t number, size_t k) {
  static const int widths[] = {8, 2, 4};
  what->options.bits = widths[k % 3];
  what->options.block_size = block_sizes[draw_number(number, 5, BLOCK_SIZES - 1)];
  what->options.scale = draw_number(number, 6, 3) ? ONEBIT_SCALE_RMS : ONEBIT_SCALE_LARGEST;
}

/* Adds a case, whose dtype is `dtype` if all dtypes are wanted. */
static struct collective_case *add_kind(struct table *table, onebit_operation_t operation,
                                        size_t count, size_t dtypes, size_t dtype) {
  struct collective_case *what = add_case(table, operation, count);
  if (dtypes == DTYPES)
    what->options.dtype = (onebit_dtype_t)dtype;
  return what;
}

/* Adds cases with dense messages for all operations, and two kinds for the allreduce only: profile
 * deepspeed, and the control without error feedback. */
static void add_other_kinds(struct table *table, size_t count, enum extent extent) {
  size_t dtypes = extent == FEW || count > 10000 ? 1 : DTYPES;
  for (size_t k = 0; k < dtypes; k++) {
    add_kind(table, ONEBIT_ALLREDUCE, count, dtypes, k)->options.profile = ONEBIT_PROFILE_DEEPSPEED;
    for (int operation = ONEBIT_ALLREDUCE; operation <= ONEBIT_REDUCE_SCATTER; operation++)
      add_kind(table, (onebit_operation_t)operation, count, dtypes, k)->options.wire =
          ONEBIT_WIRE_DENSE;
  }
  add_case(table, ONEBIT_ALLREDUCE, count)->options.no_error_feedback = 1;
}

struct collective_case *collective_cases(int size, enum extent extent, size_t *count) {
  struct table table = {.size = size};
  for (size_t c = 0; c < test_counts_count; c++) {
    for (int operation = ONEBIT_ALLREDUCE; operation <= ONEBIT_REDUCE_SCATTER; operation++) {
      size_t wanted = count_combinations(size, extent, test_counts[c]);
      for (size_t k = 0; k < wanted; k++)
        add_combination(&table, (onebit_operation_t)operation, test_counts[c],
                        /* if not all combinations fit: every block size, if these fit, with a drawn
                         * scale */
                        wanted < BLOCK_SIZES ? draw_number(table.count, 5, BLOCK_SIZES * SCALES)
                        : wanted == BLOCK_SIZES
                            ? k + BLOCK_SIZES * draw_number(table.count, 6, SCALES)
                            : k,
                        extent == EVERY_OPTION && wanted > BLOCK_SIZES * SCALES);
      for (size_t k = 0; k < (extent == FEW ? 1 : 3); k++)
        set_width(add_case(&table, (onebit_operation_t)operation, test_counts[c]), table.count,
                  extent == FEW ? table.count : k);
    }
    add_other_kinds(&table, test_counts[c], extent);
  }
  *count = table.count;
  return table.cases;
}

/* Adds cases of a schedule: compressed and dense messages, each block size in turn, and the control
 * without error feedback. */
static void add_schedule(struct table *table, size_t count, onebit_schedule_t schedule, int hosts,
                         size_t blocks) {
  size_t usable = schedule == ONEBIT_SCHEDULE_HIERARCHICAL ? BLOCK_SIZES - 1 : BLOCK_SIZES;
  for (size_t k = 0; k < blocks; k++) {
    struct collective_case *what = add_case(table, ONEBIT_ALLREDUCE, count);
    what->hosts = hosts;
    what->options.schedule = schedule;
    what->options.block_size = block_sizes[draw_number(table->count, 5, usable)];
    what->options.scale = (onebit_scale_t)draw_number(table->count, 6, SCALES);
    what->options.wire = k % 3 == 2 ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS;
    what->options.no_error_feedback = k % 8 == 7;
    if (k % 3 == 1)
      set_width(what, table->count, k / 3);
  }
}

struct collective_case *schedule_cases(int size, int hosts, enum extent extent, size_t *count) {
  struct table table = {.size = size};
  for (size_t c = 0; c < test_counts_count; c++)
    for (int schedule = ONEBIT_SCHEDULE_EXCHANGE; schedule <= OB_SCHEDULE_LAST; schedule++) {
      bool large = test_counts[c] > 10000;
      if (schedule != ONEBIT_SCHEDULE_HIERARCHICAL || size % hosts == 0)
        add_schedule(&table, test_counts[c], (onebit_schedule_t)schedule, hosts,
                     extent == FEW ? (large ? 1 : 3) : (large ? 3 : 9));
    }
  *count = table.count;
  return table.cases;
}

/* --- The choice of cases */

static size_t find_index(const size_t *list, size_t count, size_t value) {
  size_t k = 0;
  while (k < count && list[k] != value)
    k++;
  return k;
}

/* The kind of a message: its number of bits per element, or an option that fixes this number. */
enum form { ONE_BIT, TWO_BITS, FOUR_BITS, EIGHT_BITS, DENSE, DEEPSPEED, NO_FEEDBACK };
enum { NOTHING, PART_OF_A_BLOCK, WHOLE_BLOCKS, BLOCKS_AND_A_PART, LENGTHS };

static enum form message_form(const onebit_plan_options_t *options) {
  if (options->wire == ONEBIT_WIRE_DENSE)
    return DENSE;
  if (options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return DEEPSPEED;
  if (options->no_error_feedback)
    return NO_FEEDBACK;
  return options->bits == 8   ? EIGHT_BITS
         : options->bits == 4 ? FOUR_BITS
         : options->bits == 2 ? TWO_BITS
                              : ONE_BIT;
}

static size_t length_of(const struct collective_case *what) {
  const size_t block = what->options.block_size;
  if (what->count == 0)
    return NOTHING;
  if (block == ONEBIT_BLOCK_BUFFER || what->count < block)
    return PART_OF_A_BLOCK;
  return block && what->count % block == 0 ? WHOLE_BLOCKS : BLOCKS_AND_A_PART;
}

/* Returns a number for the combination of operation, block size and length of a case with one bit
 * per element. Returns 0 for other cases. */
static size_t one_bit_blocks(const struct collective_case *what, enum form form, size_t block) {
  const size_t operation = (size_t)what->options.operation;
  return form == ONE_BIT ? 1 + (operation * (BLOCK_SIZES + 1) + block) * LENGTHS + length_of(what)
                         : 0;
}

static void case_levels(const void *table, size_t row, size_t *levels) {
  const struct collective_case *what = (const struct collective_case *)table + row;
  const onebit_plan_options_t *options = &what->options;
  const enum form form = message_form(options);
  const size_t block = find_index(block_sizes, BLOCK_SIZES, options->block_size);
  const size_t all[] = {
      (size_t)options->operation,
      form,
      (size_t)options->schedule,
      find_index(test_counts, test_counts_count, what->count),
      block,
      (size_t)options->scale,
      (size_t)options->dtype,
      find_index(chunk_sizes, sizeof chunk_sizes / sizeof chunk_sizes[0], options->chunk_size),
      (size_t)options->threads,
      (size_t)what->placement,
      what->nonblocking,
      one_bit_blocks(what, form, block)};
  memcpy(levels, all, sizeof all);
}

struct sample collective_sample(const char *name, size_t thinner,
                                const struct collective_case *cases, size_t count) {
  return sample_of(&(struct sample_table){.name = name,
                                          .rows = count,
                                          .dimensions = 11,
                                          .combinations = 1,
                                          .thinner = thinner,
                                          .levels = case_levels,
                                          .table = cases});
}
