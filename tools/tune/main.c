/* onebit-tune: the command line. */
#include <math.h>
#include <stdio.h>

#include "tools/doctor/doctor.h"
#include "tools/options.h"
#include "tools/tune/tune.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>
#endif

#define AT(field) offsetof(struct tune_options, field)

static const char *const devices[] = {"host", "cuda", NULL};

static const struct tool_option rows[] = {
    {"output", 0, TOOL_TEXT, AT(output), .argument = "PATH",
     .help = "the file; else $ONEBIT_TUNING, $XDG_CONFIG_HOME/onebit/tuning or\n"
             "~/.config/onebit/tuning"},
    {"dry-run", 0, TOOL_FLAG, AT(dry_run), .help = "write no file"},
    {"quick", 0, TOOL_FLAG, AT(quick), .help = "fewer and smaller measurements: some ten seconds"},
    {.kind = TOOL_HEADING,
     .help = "With --doctor, under mpirun or srun, the same way as the program in question: finds "
             "out in\nhalf a minute whether measurements can be believed, which interface MPI's "
             "traffic takes,\nwhether another one is faster or MPI is far below plain TCP, which "
             "hosts are slow, and what\nthe kernel says: interfaces that are down, duplex, link "
             "speed, MTU, bridges such as docker0,\na host's name at 127.0.1.1, clocks that "
             "differ. It prints the causes first, and settings that\nhelp. A step that does not "
             "end within a minute ends with a message, MPI_Init too."},
    {"doctor", 0, TOOL_FLAG, AT(doctor), .help = "find what is wrong with the network"},
    {.kind = TOOL_HEADING,
     .help =
         "With --predict, measures nothing and needs no MPI: says what a step of training "
         "takes in\nthe mean of a run: dense, with each one-bit optimizer and with onebit run in 8 "
         "bits, beside\nwhat its bytes take at the rate of the link, and on which links that "
         "pays."},
    {"predict", 0, TOOL_FLAG, AT(predict), .help = "predict; needs the next three"},
    {"parameters", 0, TOOL_REAL, AT(training.parameters), "N", "of the model: 340M, 1.5G", .low = 1,
     .high = 1e14},
    {"hosts", 0, TOOL_INTEGER, AT(training.hosts), "N", "with --ranks-per-host N (default 1)",
     .low = 1, .high = 1e6},
    {"compute", 0, TOOL_SECONDS, AT(training.compute), "SECONDS",
     "of a step without its exchange, of a rank that has a core to itself: 0.250,\n250ms",
     .high = 1e6},
    {"ranks-per-host", 0, TOOL_INTEGER, AT(training.ranks_per_host), "N",
     "ranks on each host; default 1", .low = 1, .high = 1e4},
    {"bandwidth", 0, TOOL_RATE, AT(bandwidth), "RATE",
     "of a host's link: 1gbit, 300mbit; default: the tuning file's", .low = 1e3, .high = 1e13},
    {"latency", 0, TOOL_SECONDS, AT(latency), "SECONDS",
     "one way: 50us; default: the tuning file's", .high = 10},
    {"cores", 0, TOOL_REAL, AT(cores), "N", "of a host; default: the tuning file's", .low = 0.01,
     .high = 1e5},
    {"shared-cores", 0, TOOL_REAL, AT(shared_cores), "N",
     "that all hosts share, being one machine: containers, onebit-netlab", .low = 0.01,
     .high = 1e5},
    {"steps", 0, TOOL_REAL, AT(training.steps), "N",
     "of the whole run, which has the warm-up in it; default 100000", .low = 1, .high = 1e12},
    {"tuning", 0, TOOL_TEXT, AT(tuning), .argument = "PATH",
     .help = "the tuning file, of whatever machine; 'none': the defaults"},
    {"warm-up", 0, TOOL_REAL, AT(training.warm_up), "SHARE",
     "of the steps, before 1-bit Adam compresses; default 0.15, as published for\nBERT-Large",
     .high = 1},
    {"json", 0, TOOL_FLAG, AT(json), .help = "one JSON object instead of tables"},
    {.kind = TOOL_HEADING,
     .help = "With --predict --whole-run, says what the whole run of --steps takes over a slow "
             "network: with\nan exchange in each step, and with an outer step every H steps; and "
             "which to choose: of those\nwithin 5 % of no network the one that changes training "
             "least, or else the fastest. Without\n--bandwidth, for links of 10 Mbit/s to 10 "
             "Gbit/s."},
    {"whole-run", 0, TOOL_FLAG, AT(whole), .help = "of the whole run, warm-up included"},
    {"local-steps", 0, TOOL_INTEGER, AT(wanted.local_steps), "H",
     "between two outer steps; default: 10, 30, 100 and 300", .low = 2, .high = 1e6},
    {"bits", 0, TOOL_CHOICE, AT(wanted.bits), "NAME",
     "of the outer step: 1, 2, 4, 8, float32 or sparse (SparseLoCo's messages);\ndefault: 4 and 1",
     .names = tune_width_names},
    {"fragments", 0, TOOL_INTEGER, AT(wanted.fragments), "F", "of the outer step; default: 1 and 4",
     .low = 1, .high = 1e6},
    {"delay", 0, TOOL_INTEGER, AT(wanted.delay), "N",
     "steps until a fragment is applied; default: 0 and H/F", .high = 1e6},
    {.kind = TOOL_HEADING,
     .help =
         "With --predict --device cuda, ranks are GPUs that talk over NCCL, beside ncclAllReduce: "
         "from\ncounted bytes, launches and latencies, in one host and, without --bandwidth, "
         "between hosts at\n10, 25 and 100 Gbit/s. The figures are an H200's; the tuning file is "
         "not for "
         "them."},
    {"device", 0, TOOL_CHOICE, AT(device), "NAME", "host or cuda; default host", .names = devices},
    {"copy-rate", 0, TOOL_REAL, AT(card.copy), "N",
     "bytes a second that a copy reads and writes; default 4300G", .low = 1e6, .high = 1e18},
    {"nvlink-rate", 0, TOOL_REAL, AT(card.inside), "N",
     "bytes a second of a GPU to those of its host, each way; default 450G", .low = 1e6,
     .high = 1e18},
    {"launch-time", 0, TOOL_SECONDS, AT(card.launch), "SECONDS",
     "of the smallest kernel; default 2.5us", .high = 1},
    {"group-time", 0, TOOL_SECONDS, AT(card.group), "SECONDS",
     "of an NCCL group inside a host; default 10us; between hosts --latency comes\nto it, default "
     "30us",
     .high = 1},
    {0}};

static const struct tool tool = {
    .name = "onebit-tune",
    .usage = "mpirun ... onebit-tune [--output PATH] [--dry-run] [--quick]\n"
             "       mpirun ... onebit-tune --doctor\n"
             "       onebit-tune --predict --parameters N --hosts N --compute SECONDS [options]",
    .purpose = "Under mpirun, measures the cluster in about a minute, fits the cost model to it, "
               "corrects\nthe model by whole calls of each schedule, writes the tuning file, and "
               "says what plans will\nchoose by it. Corrections are for as many hosts, and ranks "
               "on each, as were measured.",
    .options = rows,
    .notes = "Exit status: 0; 1 when measuring or writing failed, or the doctor has findings; 2 "
             "for a wrong\ncommand line."};

/* The fault in options that are right each alone, as text; NULL: none. */
static const char *tune_check(const struct tune_options *options) {
  const struct tune_training *training = &options->training;
  const struct tune_card *card = &options->card;
  const struct tune_wanted *wanted = &options->wanted;
  const bool measures = options->output || options->dry_run || options->quick;
  const bool has_card = card->copy > 0 || card->inside > 0 || card->launch >= 0 || card->group >= 0;
  const bool has_outer =
      wanted->local_steps > 0 || wanted->bits >= 0 || wanted->fragments > 0 || wanted->delay >= 0;
  const bool has_warm_up = !isnan(training->warm_up), cuda = options->device == TUNE_CUDA;
  const bool asks = training->parameters > 0 || training->hosts > 0 || !isnan(training->compute) ||
                    options->bandwidth > 0 || options->json || cuda || has_card || options->whole ||
                    has_warm_up;
  const struct {
    bool wrong;
    const char *why;
  } rules[] = {
      {options->doctor && (options->predict || measures || asks), "--doctor takes no other option"},
      {!options->predict && asks, "--parameters, --hosts, --compute, --bandwidth, --device, "
                                  "--whole-run and --json are for --predict"},
      {cuda && (options->tuning || options->cores > 0 || options->shared_cores > 0),
       "--tuning, --cores and --shared-cores are not for --device cuda"},
      {!cuda && has_card,
       "--copy-rate, --nvlink-rate, --launch-time and --group-time are for --device cuda"},
      {options->predict && measures,
       "--predict measures and writes nothing: leave out --output, --dry-run and --quick"},
      {options->predict && training->parameters == 0, "--predict needs --parameters"},
      {options->predict && training->hosts == 0, "--predict needs --hosts"},
      {options->predict && isnan(training->compute), "--predict needs --compute"},
      {options->predict && !options->whole && has_outer,
       "--local-steps, --bits, --fragments and --delay are for --whole-run"},
      {options->whole && cuda, "--whole-run is not for --device cuda"},
      {options->whole && has_warm_up, "--warm-up is 1-bit Adam's, which --whole-run leaves out"}};
  for (size_t k = 0; k < sizeof rules / sizeof rules[0]; k++)
    if (rules[k].wrong)
      return rules[k].why;
  return NULL;
}

#ifdef ONEBIT_HAVE_MPI
static int tune_measure(const struct tune_options *options) {
  if (options->doctor)
    doctor_begin();
  MPI_Init(NULL, NULL);
  int status = options->doctor ? doctor_run() : tune_run(options);
  MPI_Finalize();
  return status;
}
#else
static int tune_measure(const struct tune_options *options) {
  (void)options;
  tune_complain("built without MPI (MPI=0): it can only --predict; see --help");
  return TUNE_FAILED;
}
#endif

/* Fills in what the command line leaves out; for a card, an H200's values. */
static void fill_in(struct tune_options *options) {
  struct tune_card *card = &options->card;
  card->copy = card->copy > 0 ? card->copy : tune_card_default.copy;
  card->inside = card->inside > 0 ? card->inside : tune_card_default.inside;
  card->launch = card->launch >= 0 ? card->launch : tune_card_default.launch;
  card->group = card->group >= 0 ? card->group : tune_card_default.group;
  card->latency = options->latency > 0 ? options->latency : tune_card_default.latency;
  if (isnan(options->training.warm_up))
    options->training.warm_up = TUNE_WARM_UP;
  options->training.steps = floor(options->training.steps);
}

int main(int argc, char **argv) {
  struct tune_options options = {
      .training = {.compute = NAN, .ranks_per_host = 1, .steps = 100000, .warm_up = NAN},
      .card = {.launch = NAN, .group = NAN},
      .wanted = {.bits = -1, .delay = -1}};
  char error[TOOL_ERROR];
  enum tool_asked asked = tool_parse(&tool, &argc, argv, &options, error);
  if (asked != TOOL_RUN)
    return tool_answer(&tool, asked, error);
  if (tune_check(&options))
    return tool_answer(&tool, TOOL_WRONG, tune_check(&options));
  fill_in(&options);
  return options.predict ? tune_predict(&options) : tune_measure(&options);
}
