/* onebit-tune: defines the command line, and runs the selected mode. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>
#endif

#define AT(field) offsetof(struct tune_options, field)

/* The modes of the program. The `groups` of an option have a bit for each mode that accepts it. */
enum { MEASURE = 1, DOCTOR = 2, STEPS = 4, WHOLE = 8, CARDS = 16 };
#define PREDICT (STEPS | WHOLE | CARDS)

static const char *const devices[] = {"host", "cuda", NULL};

static const struct tool_option rows[] = {
    {"output", 0, TOOL_TEXT, AT(output), .argument = "PATH",
     .help = "the file to write; default: $ONEBIT_TUNING,\n$XDG_CONFIG_HOME/onebit/tuning or "
             "~/.config/onebit/tuning",
     .groups = MEASURE},
    {"dry-run", 0, TOOL_FLAG, AT(dry_run), .help = "measure, but write no file", .groups = MEASURE},
    {.kind = TOOL_HEADING,
     .help = "With --doctor, started by mpirun or srun in the same way as the program in question, "
             "finds\nfaults of the network in half a minute: whether measurements are reliable, "
             "which interface\nMPI's traffic takes, whether another interface is faster, whether "
             "MPI is far slower than plain\nTCP, and which hosts are slow. It also reports what "
             "the kernel says: interfaces that are down,\nduplex, link speed, MTU, bridges such as "
             "docker0, a host's name at 127.0.1.1, clocks that\ndiffer. It prints the causes "
             "first, with settings that help. If a step, even MPI_Init, does\nnot end within a "
             "minute, the doctor prints a message and ends."},
    {"doctor", 0, TOOL_FLAG, AT(doctor), .help = "find what is wrong with the network"},
    {.kind = TOOL_HEADING,
     .help = "With --predict, measures nothing and needs no MPI. Prints the mean time of a "
             "training step over\na run: dense, with each one-bit optimizer, and with onebit run "
             "in 8 bits. Each time stands next\nto the time of its bytes at the link's rate, and "
             "to the links on which compression pays."},
    {"predict", 0, TOOL_FLAG, AT(predict),
     .help = "predict; needs --parameters, --hosts and --compute"},
    {"parameters", 0, TOOL_REAL, AT(training.parameters), "N",
     "parameters of the model: 340M, 1.5G", .low = 1, .high = 1e14, .groups = PREDICT},
    {"hosts", 0, TOOL_INTEGER, AT(training.hosts), "N", "number of hosts", .low = 1, .high = 1e6,
     .groups = PREDICT},
    {"compute", 0, TOOL_SECONDS, AT(training.compute), "SECONDS",
     "time of a step without its exchange, on a rank that has a core of its own:\n0.250, 250ms",
     .high = 1e6, .groups = PREDICT},
    {"ranks-per-host", 0, TOOL_INTEGER, AT(training.ranks_per_host), "N",
     "ranks on each host; default 1", .low = 1, .high = 1e4, .groups = PREDICT},
    {"bandwidth", 0, TOOL_RATE, AT(bandwidth), "RATE",
     "rate of a host's link: 1gbit, 300mbit; default: the tuning file's", .low = 1e3, .high = 1e13,
     .groups = PREDICT},
    {"latency", 0, TOOL_SECONDS, AT(latency), "SECONDS",
     "one-way latency: 50us; default: the tuning file's", .high = 10, .groups = PREDICT},
    {"cores", 0, TOOL_REAL, AT(cores), "N", "cores per host; default: the tuning file's",
     .low = 0.01, .high = 1e5, .groups = STEPS | WHOLE},
    {"shared-cores", 0, TOOL_REAL, AT(shared_cores), "N",
     "cores that all hosts share because they are one machine: containers,\nonebit-netlab",
     .low = 0.01, .high = 1e5, .groups = STEPS | WHOLE},
    {"buckets", 0, TOOL_REAL, AT(training.buckets), "N",
     "buckets whose exchanges overlap with the computation of the following ones;\ndefault: one "
     "for each "
     "25 MiB of gradients, at most 25",
     .low = 1, .high = 1e6, .groups = STEPS | CARDS},
    {"clip", 0, TOOL_FLAG, AT(training.clip),
     .help = "the program clips gradients by their norm, so that one bit does not overlap",
     .groups = STEPS | CARDS},
    {"steps", 0, TOOL_REAL, AT(training.steps), "N",
     "steps of the whole run, including the warm-up; default 100000", .low = 1, .high = 1e12,
     .groups = PREDICT},
    {"tuning", 0, TOOL_TEXT, AT(tuning), .argument = "PATH",
     .help = "another tuning file, even from another machine; 'none': the defaults",
     .groups = STEPS | WHOLE},
    {"warm-up", 0, TOOL_REAL, AT(training.warm_up), "SHARE",
     "fraction of the steps before 1-bit Adam compresses; default 0.15, as\npublished for "
     "BERT-Large",
     .high = 1, .groups = STEPS | CARDS},
    {"json", 0, TOOL_FLAG, AT(json), .help = "print one JSON object instead of tables",
     .groups = PREDICT},
    {.kind = TOOL_HEADING,
     .help = "With --predict --whole-run, prints the time of a whole run of --steps over a slow "
             "network: with\nan exchange in each step, and with an outer step every H steps. It "
             "also chooses one of them: of\nthose within 5 % of the time without a network, the "
             "one that changes training least; if there is\nnone, the fastest. Without "
             "--bandwidth, it does so for links of 10 Mbit/s to 10 Gbit/s."},
    {"whole-run", 0, TOOL_FLAG, AT(whole), .help = "predict the whole run, including the warm-up",
     .groups = STEPS | WHOLE},
    {"local-steps", 0, TOOL_INTEGER, AT(wanted.local_steps), "H",
     "steps between two outer steps; default: 10, 30, 100 and 300", .low = 2, .high = 1e6,
     .groups = WHOLE},
    {"bits", 0, TOOL_CHOICE, AT(wanted.bits), "NAME",
     "bits of the outer step: 1, 2, 4, 8, float32 or sparse (SparseLoCo's\nmessages); default: 4 "
     "and 1",
     .names = tune_width_names, .groups = WHOLE},
    {"fragments", 0, TOOL_INTEGER, AT(wanted.fragments), "F",
     "fragments of the outer step; default: 1 and 4", .low = 1, .high = 1e6, .groups = WHOLE},
    {"delay", 0, TOOL_INTEGER, AT(wanted.delay), "N",
     "steps until a fragment is applied; default: 0 and H/F", .high = 1e6, .groups = WHOLE},
    {.kind = TOOL_HEADING,
     .help = "With --predict --device cuda, ranks are GPUs that use NCCL, and are compared with "
             "ncclAllReduce.\nThe times are computed from counted bytes, launches and latencies, "
             "in one host and, without\n--bandwidth, between hosts at 10, 25 and 100 Gbit/s. The "
             "figures are those of an H200; --latency\nis the latency of an NCCL group between "
             "hosts, default 30us."},
    {"device", 0, TOOL_CHOICE, AT(device), "NAME",
     "device of the ranks: host or cuda; default host", .names = devices, .groups = PREDICT},
    {"copy-rate", 0, TOOL_REAL, AT(card.copy), "N",
     "bytes per second that a copy reads and writes; default 4300G", .low = 1e6, .high = 1e18,
     .groups = CARDS},
    {"nvlink-rate", 0, TOOL_REAL, AT(card.inside), "N",
     "bytes per second from a GPU to the others of its host, each way; default 450G", .low = 1e6,
     .high = 1e18, .groups = CARDS},
    {"pcie-rate", 0, TOOL_REAL, AT(card.pcie), "N",
     "bytes per second of copies between a GPU and its host; default 25G", .low = 1e6, .high = 1e18,
     .groups = CARDS},
    {"memory-rate", 0, TOOL_REAL, AT(card.memory), "N",
     "bytes per second that a host's processors read and write; default 300G", .low = 1e6,
     .high = 1e18, .groups = CARDS},
    {0}};

static const struct tool tool = {
    .name = "onebit-tune",
    .usage = "mpirun ... onebit-tune [--output PATH] [--dry-run]\n"
             "       mpirun ... onebit-tune --doctor\n"
             "       onebit-tune --predict --parameters N --hosts N --compute SECONDS [options]",
    .purpose = "Under mpirun, measures the cluster in about a minute and fits the cost model to "
               "it. Corrects\nthe model by whole calls of each schedule, writes the tuning file, "
               "and prints what plans will\nchoose by it. The corrections apply only to the "
               "measured number of hosts and of ranks per host.",
    .options = rows,
    .group = MEASURE | DOCTOR | PREDICT,
    .notes = "Exit status: 0; 1 when measuring or writing failed, or the doctor has findings; 2 "
             "for a wrong\ncommand line."};

static unsigned get_mode(const struct tune_options *options) {
  if (!options->predict)
    return options->doctor ? DOCTOR : MEASURE;
  return options->device == TUNE_CUDA ? CARDS : options->whole ? WHOLE : STEPS;
}

static const char *get_mode_name(unsigned groups) {
  static const char *const names[] = {"measuring", "--doctor", "--predict", "--whole-run",
                                      "--device cuda"};
  return names[__builtin_ctz(groups)];
}

/* Finds an option on the command line that the mode does not accept. */
static const struct tool_option *find_misplaced(char **argv, unsigned mode) {
  for (const struct tool_option *row = rows; row->kind; row++)
    for (char **word = argv + 1; row->groups && !(row->groups & mode) && *word; word++) {
      const bool is_long = strncmp(*word, "--", 2) == 0;
      const size_t length = is_long ? strcspn(*word + 2, "=") : 0;
      if (length == strlen(row->name) && strncmp(*word + 2, row->name, length) == 0)
        return row;
    }
  return NULL;
}

/* Returns true and writes an error message if the combination of options is invalid. */
static bool find_fault(const struct tune_options *options, char **argv, char error[TOOL_ERROR]) {
  const struct tune_training *training = &options->training;
  const unsigned mode = get_mode(options);
  const struct tool_option *misplaced = find_misplaced(argv, mode);
  error[0] = '\0';
  if (options->doctor && options->predict)
    snprintf(error, TOOL_ERROR, "--doctor cannot be combined with --predict");
  else if (misplaced)
    snprintf(error, TOOL_ERROR, "--%s: is for %s, not for %s", misplaced->name,
             get_mode_name(misplaced->groups), get_mode_name(mode));
  else if (options->predict)
    snprintf(error, TOOL_ERROR, "%s",
             training->parameters == 0  ? "--predict needs --parameters"
             : training->hosts == 0     ? "--predict needs --hosts"
             : isnan(training->compute) ? "--predict needs --compute"
                                        : "");
  return error[0];
}

#ifdef ONEBIT_HAVE_MPI
static int measure_cluster(const struct tune_options *options) {
  if (options->doctor)
    doctor_begin();
  MPI_Init(NULL, NULL);
  int status = options->doctor ? doctor_run() : tune_run(options);
  MPI_Finalize();
  return status;
}
#else
static int measure_cluster(const struct tune_options *options) {
  (void)options;
  tune_print_error(
      "this onebit-tune was built without MPI (MPI=0): it can only --predict; see --help");
  return TUNE_FAILED;
}
#endif

int main(int argc, char **argv) {
  struct tune_options options = {
      .training = {.compute = NAN, .ranks_per_host = 1, .steps = 100000, .warm_up = TUNE_WARM_UP},
      .card = tune_card_default,
      .wanted = {.bits = -1, .delay = -1}};
  char error[TOOL_ERROR];
  enum tool_asked asked = tool_parse(&tool, &argc, argv, &options, error);
  if (asked == TOOL_RUN && find_fault(&options, argv, error))
    asked = TOOL_WRONG;
  if (asked != TOOL_RUN)
    return tool_print_answer(&tool, asked, error);
  options.training.steps = floor(options.training.steps);
  if (options.latency > 0)
    options.card.latency = options.latency;
  return options.predict ? tune_predict(&options) : measure_cluster(&options);
}
