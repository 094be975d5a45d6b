/* Tests the tuning file: what was written can be read, and no content of a file does harm. */
#include "collectives/cost/tuning.h"
#include "tests/support.h"
#include "tests/support_disk.h"

static const struct ob_tuning_here here = {"node2", "avx2"};

static struct ob_costs make_odd_costs(void) {
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  for (size_t k = 0; k < OB_TUNING_KEYS; k++) {
    const struct ob_tuning_key *key = &ob_tuning_keys[k];
    double value = key->low + (key->high - key->low) / (3 + (double)k) * 1e-3;
    memcpy((char *)&costs + key->offset, &value, sizeof value);
  }
  costs.hosts = 3;
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    for (size_t i = 0; i < (k == 1 ? OB_COST_POINTS : k); i++) {
      size_t bytes = (size_t)1024 << i;
      ob_cost_add_point(&costs.measured.factor[k], (double)bytes, 0.75 + (double)i);
    }
  ob_cost_add_point(&costs.measured.chunk, 4194304, 131072);
  ob_cost_add_point(&costs.measured.chunk, 16777216, 262144);
  return costs;
}

/* Returns the text of a good file. The caller frees it. */
static char *make_good_file(void) {
  static const char *const hosts[] = {"node1", "node2", "4th#host"};
  static const struct ob_tuning_origin origin = {"2026-11-21", "Some MPI 4.1", hosts, 3};
  struct ob_costs costs = make_odd_costs();
  char *text;
  size_t length;
  FILE *file = open_memstream(&text, &length);
  cr_assert(ob_tuning_write(file, &costs, &origin));
  fclose(file);
  return text;
}

static enum ob_tuning_state parse_text(const char *text, size_t length,
                                       const struct ob_tuning_here *whose, struct ob_costs *costs) {
  FILE *file = fmemopen((void *)(uintptr_t)text, length ? length : 1, "r");
  if (!length)
    getc(file);
  enum ob_tuning_state state = ob_tuning_parse(file, "a file", whose, costs, NULL);
  fclose(file);
  return state;
}

/* Parses the good file after replacing the first occurrence of `old`. */
static enum ob_tuning_state parse_damaged_file(const char *old, const char *fresh,
                                               struct ob_costs *costs) {
  char *good = make_good_file(), *at = strstr(good, old);
  cr_assert(at, "%s", old);
  size_t before = (size_t)(at - good), room = strlen(good) + strlen(fresh) + 1;
  char *text = malloc(room);
  int length = snprintf(text, room, "%.*s%s%s", (int)before, good, fresh, at + strlen(old));
  enum ob_tuning_state state = parse_text(text, (size_t)length, &here, costs);
  free(text);
  free(good);
  return state;
}

static void expect_defaults(const struct ob_costs *costs, const char *words) {
  struct ob_costs defaults;
  ob_costs_default("avx2", &defaults);
  cr_expect(strstr(costs->source, words), "'%s' is not in '%s'", words, costs->source);
  cr_expect(memcmp(costs, &defaults, offsetof(struct ob_costs, source)) == 0);
}

static void expect_same_numbers(const struct ob_costs *a, const struct ob_costs *b) {
  for (size_t k = 0; k < OB_TUNING_KEYS; k++) {
    double x, y;
    memcpy(&x, (const char *)a + ob_tuning_keys[k].offset, sizeof x);
    memcpy(&y, (const char *)b + ob_tuning_keys[k].offset, sizeof y);
    cr_expect_float_eq(x, y, 1e-8 * y, "%s: %g, not %g", ob_tuning_keys[k].name, x, y);
  }
}

Test(tuning, reads_what_it_wrote) {
  struct ob_costs costs, wanted = make_odd_costs();
  char *text = make_good_file();
  cr_assert_eq(parse_text(text, strlen(text), &here, &costs), OB_TUNING_READ, "%s", costs.source);
  expect_same_numbers(&costs, &wanted);
  cr_expect_str_eq(costs.codec, "avx2");
  cr_expect(memcmp(&costs.measured, &wanted.measured, sizeof costs.measured) == 0);
  cr_expect(strstr(text, "\ncorrection allgather bits 1024 0.750\n"), "%s", text);
  cr_expect(strstr(text, "\nchunk 16777216 262144\n"), "%s", text);
  cr_expect(strstr(costs.source, "a file of 2026-11-21"), "%s", costs.source);
  free(text);
}

Test(tuning, a_file_is_a_regular_one) {
  char directory[] = "/tmp/onebit-tuning-XXXXXX", path[64];
  cr_assert(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/tuning", directory);
  for (enum irregular kind = A_FIFO; kind < IRREGULARS; kind++) {
    struct ob_costs costs;
    irregular_make(kind, path);
    cr_expect_eq(ob_tuning_read(path, &here, &costs, NULL), OB_TUNING_MISSING);
    expect_defaults(&costs, "cannot be read: not a regular file");
    irregular_remove(kind, path);
  }
  rmdir(directory);
}

Test(tuning, names_the_damaged_line) {
  static const struct {
    const char *old, *fresh, *words;
  } cases[] = {
      {"onebit tuning 1", "one bit tuning 1", "line 1 does not say 'onebit tuning 1'"},
      {"onebit tuning 1", "onebit tuning one", "line 1 does not say"},
      {"codec avx2", "codec", "line 5 has no value for 'codec'"},
      {"codec avx2\n", "", "codec is missing"},
      {"host node1\nhost node2\nhost 4th#host\n", "", "host is missing"},
      {"date 2026", "date x\ndate 2026", "line 4 repeats the key date"},
      {"hosts ", "guests ", "line 9 has an unknown key, 'guests'"},
      {"hosts 3", "hosts three #", "hosts is 'three', not a number"},
      {"hosts 3", "hosts nan #", "hosts is 'nan', not a number"},
      {"hosts 3", "hosts -3", "hosts is '-3.00000000e+00', not a number"},
      {"hosts 3", "hosts 0x3", "hosts is '0x3.00000000e+00', not a number"},
      {"hosts 3.00000000e+00", "hosts 1e400", "hosts is '1e400', not a number"},
      {"hosts 3.00000000e+00", "hosts 1e7", "hosts is 1e7, not 1 to 1e+06"},
      {"hosts 3.00000000e+00", "hosts 1e", "hosts is '1e', not a number"},
      {"hosts 3.00000000e+00", "hosts 1.2.3", "hosts is '1.2.3', not a number"},
      {"between.bandwidth ", "between.bandwidth 0\n#", "between.bandwidth is 0, not 1 to"},
      {"compress ", "#", "compress is missing"},
      {"compress ", "compress 0\ncompress ", "repeats the key compress"},
      {"correction allgather bits 1024 0.750", "correction allgather bits 1024",
       "line 39 is not 'correction SCHEDULE WIRE BYTES FACTOR'"},
      {"correction allgather bits 1024 0.750", "correction allgather bits 1024 1 1",
       "line 39 is not 'correction SCHEDULE WIRE BYTES FACTOR'"},
      {"correction allgather bits 1024", "correction ring bits 1024",
       "line 39 corrects 'ring bits', which is not a schedule with its wire"},
      {"correction allgather bits 1024", "correction hierarchical float32 1024",
       "corrects 'hierarchical float32', which is not a schedule with its wire"},
      {"bits 1024 0.750", "bits 1024 0.04", "line 39 factor is 0.04, not 0.05 to 20"},
      {"bits 1024 0.750", "bits 1024 20.1", "line 39 factor is 20.1, not 0.05 to 20"},
      {"bits 1024 0.750", "bits 1024 nan", "line 39 factor is 'nan', not a number"},
      {"bits 1024 0.750", "bits 3 0.750", "line 39 size is 3, not 4 to 1e+15"},
      {"bits 1024 0.750", "bits 2048 0.750",
       "line 40 is for 2048 bytes, which is not more than in the line before"},
      {"correction hierarchical", "correction allgather bits 1e9 1\ncorrection hierarchical",
       "line 55 is one more than the 16 points that are read"},
      {"chunk 4194304 131072", "chunk 4194304", "is not 'chunk BYTES ELEMENTS'"},
      {"chunk 4194304 131072", "chunk 4194304 31", "chunk is 31, not 32 to"},
      {"chunk 4194304", "chunk 16777216",
       "is for 16777216 bytes, which is not more than in the line before"},
  };
  struct ob_costs costs;
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    cr_expect_eq(parse_damaged_file(cases[k].old, cases[k].fresh, &costs), OB_TUNING_DAMAGED,
                 "case %zu", k);
    expect_defaults(&costs, cases[k].words);
    expect_defaults(&costs, "damaged: line ");
  }
}

Test(tuning, takes_comments_and_spaces) {
  struct ob_costs costs;
  cr_expect_eq(parse_damaged_file("hosts 3.0", "\n \n  # x\nhosts \t 3.0", &costs), OB_TUNING_READ);
  cr_expect_eq(parse_damaged_file("hosts 3.0", "hosts 3#\n# 3.0", &costs), OB_TUNING_READ, "%s",
               costs.source);
  cr_expect_eq(parse_damaged_file("codec avx2\n", "codec avx2 \r\n", &costs), OB_TUNING_READ, "%s",
               costs.source);
}

Test(tuning, needs_no_corrections) {
  struct ob_costs costs;
  cr_expect_eq(parse_damaged_file("chunk 4194304 131072\nchunk 16777216 262144\n", "", &costs),
               OB_TUNING_READ, "%s", costs.source);
  cr_expect_eq(costs.measured.chunk.count, 0);
  cr_expect_eq(parse_damaged_file("bits 1024 0.750", "\tbits  1024 0.5 # note", &costs),
               OB_TUNING_READ, "%s", costs.source);
  cr_expect_eq(costs.measured.factor[1].point[0].value, 0.5);
}

Test(tuning, leaves_a_newer_version_alone) {
  struct ob_costs costs;
  cr_expect_eq(parse_damaged_file("onebit tuning 1", "onebit tuning 2", &costs), OB_TUNING_NEWER);
  expect_defaults(&costs, "has a format newer than version 1");
}

Test(tuning, does_not_take_another_machines) {
  struct ob_costs costs;
  char *text = make_good_file();
  struct ob_tuning_here other = {"node3", "avx2"};
  cr_expect_eq(parse_text(text, strlen(text), &other, &costs), OB_TUNING_STALE);
  expect_defaults(&costs, "was measured on other hosts, not on node3: run onebit-tune here");
  other = (struct ob_tuning_here){"4th#host", "scalar"};
  cr_expect_eq(parse_text(text, strlen(text), &other, &costs), OB_TUNING_STALE);
  cr_expect(strstr(costs.source, "was measured with codec avx2, but this host uses codec scalar"),
            "%s", costs.source);
  other = (struct ob_tuning_here){NULL, NULL};
  cr_expect_eq(parse_text(text, strlen(text), &other, &costs), OB_TUNING_READ);
  free(text);
}

Test(tuning, bounds_what_it_reads) {
  size_t length = 1 << 20;
  char *text = malloc(length);
  struct ob_costs costs;
  memset(text, 'a', length);
  cr_expect_eq(parse_text(text, length, &here, &costs), OB_TUNING_DAMAGED);
  expect_defaults(&costs, "line 1 is too long, or has a zero byte");
  memset(text, '\n', length);
  memcpy(text, "onebit tuning 1", 15);
  cr_expect_eq(parse_text(text, length, &here, &costs), OB_TUNING_DAMAGED);
  expect_defaults(&costs, " lines that a file may have");
  free(text);
}

Test(tuning, finds_the_file_of_the_environment) {
  char path[OB_TUNING_PATH_CAPACITY];
  struct ob_costs costs;
  setenv("ONEBIT_TUNING", "none", 1);
  cr_expect(!ob_tuning_path(path));
  cr_expect_eq(ob_tuning_find(&costs), OB_TUNING_OFF);
  setenv("ONEBIT_TUNING", "/no/such/file", 1);
  cr_assert(ob_tuning_path(path));
  cr_expect_str_eq(path, "/no/such/file");
  cr_expect_eq(ob_tuning_find(&costs), OB_TUNING_MISSING);
  cr_expect(strstr(costs.source, "/no/such/file does not exist"), "%s", costs.source);
  unsetenv("ONEBIT_TUNING");
  setenv("XDG_CONFIG_HOME", "/x", 1);
  setenv("HOME", "/h", 1);
  cr_expect(ob_tuning_path(path) && strcmp(path, "/x/onebit/tuning") == 0, "%s", path);
  unsetenv("XDG_CONFIG_HOME");
  cr_expect(ob_tuning_path(path) && strcmp(path, "/h/.config/onebit/tuning") == 0, "%s", path);
  unsetenv("HOME");
  cr_expect(!ob_tuning_path(path));
  setenv("ONEBIT_TUNING", "/", 1); /* a path that can be opened but not read */
  cr_expect_neq(ob_tuning_find(&costs), OB_TUNING_READ);
}

Test(tuning, reads_numbers_as_c_writes_them) {
  static const struct {
    const char *text;
    double value;
  } good[] = {{"0", 0},     {"12", 12},           {"1.5", 1.5},  {".5", 0.5},  {"5.", 5},
              {"1e3", 1e3}, {"1.25E-9", 1.25e-9}, {"2e+2", 200}, {"1e-999", 0}};
  static const char *const bad[] = {"",      ".",   "-1",  "+1",    "1,5",  "inf", "e5",
                                    "1e999", "1 2", "1e-", "0x1p3", "1e5x", "1..5"};
  double value;
  for (size_t k = 0; k < sizeof good / sizeof good[0]; k++) {
    cr_expect(ob_tuning_number(good[k].text, &value), "%s", good[k].text);
    cr_expect_float_eq(value, good[k].value, 1e-14 * good[k].value, "%s", good[k].text);
  }
  for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++)
    cr_expect(!ob_tuning_number(bad[k], &value), "'%s'", bad[k]);
}
