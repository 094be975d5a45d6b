/* The command line of onebit-tune, and numbers with units. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "tools/tune/tune.h"

static const char help[] =
    "usage: mpirun ... onebit-tune [--output PATH] [--dry-run] [--quick]\n"
    "       onebit-tune --predict --parameters N --hosts N --compute SECONDS [options]\n"
    "\n"
    "Under mpirun, measures the cluster in about a minute, fits the cost model to it, corrects\n"
    "the model by whole calls of each schedule, writes the tuning file, and says what plans will\n"
    "choose by it. Corrections are for as many hosts, and ranks on each, as were measured.\n"
    "\n"
    "  --output PATH         the file; else $ONEBIT_TUNING, $XDG_CONFIG_HOME/onebit/tuning or\n"
    "                        ~/.config/onebit/tuning\n"
    "  --dry-run             write no file\n"
    "  --quick               fewer and smaller measurements: some ten seconds\n"
    "\n"
    "With --predict, measures nothing and needs no MPI: says what a step of training takes with\n"
    "dense exchange, with one bit and with 0/1 Adam, and where compression stops to pay.\n"
    "\n"
    "  --parameters N        of the model: 340M, 1.5G\n"
    "  --hosts N             with --ranks-per-host N (default 1)\n"
    "  --compute SECONDS     of a step without its exchange: 0.250, 250ms\n"
    "  --bandwidth RATE      of a host's link: 1gbit, 300mbit; default: the tuning file's\n"
    "  --latency SECONDS     one way: 50us; default: the tuning file's\n"
    "  --cores N             of a host; default: the tuning file's\n"
    "  --steps N             of the whole run, for 0/1 Adam's intervals; default 100000\n"
    "  --tuning PATH         the tuning file, of whatever machine; 'none': the defaults\n"
    "  --json                one JSON object instead of tables\n"
    "\n"
    "  -h, --help            this text\n"
    "\n"
    "Exit status: 0; 1 when measuring or writing failed; 2 for a wrong command line.\n";

void tune_print_help(void) { fputs(help, stdout); }

void tune_complain(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("onebit-tune: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

/* --- Numbers */

struct suffix {
  enum tune_unit unit;
  const char *name;
  double factor;
};

static const struct suffix suffixes[] = {
    {TUNE_COUNT, "", 1},
    {TUNE_COUNT, "K", 1e3},
    {TUNE_COUNT, "M", 1e6},
    {TUNE_COUNT, "G", 1e9},
    {TUNE_COUNT, "B", 1e9},
    {TUNE_BITS_A_SECOND, "kbit", 1e3 / 8},
    {TUNE_BITS_A_SECOND, "mbit", 1e6 / 8},
    {TUNE_BITS_A_SECOND, "gbit", 1e9 / 8},
    {TUNE_SECONDS, "", 1},
    {TUNE_SECONDS, "s", 1},
    {TUNE_SECONDS, "ms", 1e-3},
    {TUNE_SECONDS, "us", 1e-6},
};

bool tune_quantity(const char *text, enum tune_unit unit, double *value) {
  char number[32];
  size_t length = strspn(text, "0123456789.");
  if (length == 0 || length >= sizeof number)
    return false;
  memcpy(number, text, length);
  number[length] = '\0';
  if (!ob_tuning_number(number, value))
    return false;
  for (size_t k = 0; k < sizeof suffixes / sizeof suffixes[0]; k++)
    if (suffixes[k].unit == unit && strcasecmp(text + length, suffixes[k].name) == 0) {
      *value *= suffixes[k].factor;
      return true;
    }
  return false;
}

void tune_bytes_text(double bytes, char text[24]) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t k = 0;
  for (; bytes >= 1024 && k < 4; k++)
    bytes /= 1024;
  snprintf(text, 24, bytes == floor(bytes) || k == 0 ? "%.0f %s" : "%.1f %s", bytes, units[k]);
}

void tune_time_text(double seconds, char text[24]) {
  if (seconds < 9.95e-6)
    snprintf(text, 24, "%.1f us", 1e6 * seconds);
  else if (seconds < 0.9995e-3)
    snprintf(text, 24, "%.0f us", 1e6 * seconds);
  else if (seconds < 0.9995)
    snprintf(text, 24, "%.3g ms", 1e3 * seconds);
  else
    snprintf(text, 24, "%.2f s", seconds);
}

/* --- Options */

struct row {
  const char *name;
  char kind; /* f flag, t text, c count, w whole number, b bandwidth, s seconds */
  size_t offset;
  double low, high;
};

#define AT(field) offsetof(struct tune_options, field)

static const struct row rows[] = {
    {"--predict", 'f', AT(predict), 0, 0},
    {"--dry-run", 'f', AT(dry_run), 0, 0},
    {"--quick", 'f', AT(quick), 0, 0},
    {"--json", 'f', AT(json), 0, 0},
    {"--output", 't', AT(output), 0, 0},
    {"--tuning", 't', AT(tuning), 0, 0},
    {"--parameters", 'c', AT(parameters), 1, 1e14},
    {"--steps", 'c', AT(steps), 1, 1e12},
    {"--hosts", 'w', AT(hosts), 1, 1e6},
    {"--ranks-per-host", 'w', AT(ranks_per_host), 1, 1e4},
    {"--cores", 'c', AT(cores), 0.01, 1e5},
    {"--compute", 's', AT(compute), 0, 1e6},
    {"--latency", 's', AT(latency), 0, 10},
    {"--bandwidth", 'b', AT(bandwidth), 1e3, 1e13},
};

static bool take_number(const struct row *row, const char *text, struct tune_options *options,
                        char error[256]) {
  enum tune_unit unit = row->kind == 'b'   ? TUNE_BITS_A_SECOND
                        : row->kind == 's' ? TUNE_SECONDS
                                           : TUNE_COUNT;
  static const char *const like[] = {"a number such as 340M or 16",
                                     "a rate such as 300mbit or 1gbit",
                                     "a time such as 0.250, 250ms or 50us"};
  double value;
  void *field = (char *)options + row->offset;
  if (!tune_quantity(text, unit, &value) || (row->kind == 'w' && value != floor(value))) {
    snprintf(error, 256, "%s %.60s: not %s", row->name, text, like[unit]);
    return false;
  }
  if (value < row->low || value > row->high) {
    snprintf(error, 256, "%s %.60s: out of range", row->name, text);
    return false;
  }
  if (row->kind == 'w')
    *(int *)field = (int)value;
  else
    *(double *)field = value;
  return true;
}

static const struct row *find(const char *name) {
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
    if (strcmp(name, rows[k].name) == 0)
      return &rows[k];
  return NULL;
}

static bool check(const struct tune_options *options, bool compute_given, char error[256]) {
  const char *missing = options->parameters == 0 ? "--parameters"
                        : options->hosts == 0    ? "--hosts"
                        : !compute_given         ? "--compute"
                                                 : NULL;
  bool asks = options->parameters > 0 || options->hosts > 0 || compute_given ||
              options->bandwidth > 0 || options->json;
  if (options->predict && missing)
    snprintf(error, 256, "--predict needs %s", missing);
  else if (options->predict && (options->output || options->dry_run || options->quick))
    snprintf(error, 256,
             "--predict measures and writes nothing: leave out --output, --dry-run "
             "and --quick");
  else if (!options->predict && asks)
    snprintf(error, 256,
             "--parameters, --hosts, --compute, --bandwidth and --json are for "
             "--predict");
  else
    return true;
  return false;
}

bool tune_options_parse(int argc, char **argv, struct tune_options *options, bool *help_asked,
                        char error[256]) {
  bool compute_given = false;
  *options = (struct tune_options){.ranks_per_host = 1, .steps = 100000};
  *help_asked = false;
  for (int i = 1; i < argc; i++) {
    const struct row *row = find(argv[i]);
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
      return *help_asked = true;
    if (!row || (row->kind != 'f' && i + 1 == argc)) {
      snprintf(error, 256, row ? "%.60s: needs a value" : "%.60s: unknown option; see --help",
               argv[i]);
      return false;
    }
    if (row->kind == 'f')
      *(bool *)((char *)options + row->offset) = true;
    else if (row->kind == 't')
      *(const char **)((char *)options + row->offset) = argv[++i];
    else if (!take_number(row, argv[++i], options, error))
      return false;
    compute_given |= row->offset == AT(compute);
  }
  return check(options, compute_given, error);
}
