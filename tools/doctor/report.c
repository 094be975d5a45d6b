/* What the doctor prints: tables of what was measured, findings, and settings to paste. */
#include <string.h>

#include "tools/doctor/doctor.h"

const char *doctor_address(uint32_t address, char *text) {
  snprintf(text, DOCTOR_ADDRESS, "%u.%u.%u.%u", address >> 24, address >> 16 & 255,
           address >> 8 & 255, address & 255);
  return text;
}

const char *doctor_network(const struct doctor_subnet *subnet, char *text) {
  char address[DOCTOR_ADDRESS];
  snprintf(text, DOCTOR_ADDRESS, "%.15s/%d", doctor_address(subnet->network, address),
           __builtin_popcount(subnet->netmask));
  return text;
}

/* --- Tables ------------------------------------------------------------------------------------*/

/* Rows and columns of a table at most; what is measured on further hosts is judged all the same. */
enum { TABLE_HOSTS = 16 };

static int shown(const struct doctor_facts *facts) {
  return facts->host_count < TABLE_HOSTS ? facts->host_count : TABLE_HOSTS;
}

static void print_more(FILE *file, const struct doctor_facts *facts) {
  if (facts->host_count > TABLE_HOSTS)
    fprintf(file, "  ... and %d more hosts\n", facts->host_count - TABLE_HOSTS);
}

static void print_value(FILE *file, double value, int width, int digits) {
  if (value > 0)
    fprintf(file, " %*.*f", width, digits, value);
  else
    fprintf(file, " %*s", width, "-");
}

static bool is_set(const uint64_t *cpus, int cpu) {
  return cpu < 64 * DOCTOR_CPU_TEXT && cpus[cpu / 64] >> cpu % 64 & 1;
}

/* "0-3,8", or as much of it as fits. */
static void print_cpus(FILE *file, const uint64_t *cpus) {
  int used = 0;
  for (int cpu = 0; cpu < 64 * DOCTOR_CPU_TEXT && used < 52; cpu++) {
    int first = cpu;
    if (!is_set(cpus, cpu))
      continue;
    while (is_set(cpus, cpu + 1))
      cpu++;
    used += fprintf(file, "%s%d", used ? "," : "", first);
    if (cpu > first)
      used += fprintf(file, "-%d", cpu);
  }
}

static const struct doctor_rank *first_rank(const struct doctor_facts *facts, int host) {
  const struct doctor_rank *rank = facts->ranks;
  while (rank->host != host)
    rank++;
  return rank;
}

static void print_ranks(FILE *file, const struct doctor_facts *facts) {
  fprintf(file,
          "\nRanks; a hop of a message that goes round the ranks of a host, in us\n"
          "  %-16s %6s %6s %6s %9s  %s\n",
          "host", "ranks", "CPUs", "usable", "hop", "first rank's CPUs");
  for (int h = 0; h < shown(facts); h++) {
    const struct doctor_host *host = &facts->hosts[h];
    fprintf(file, "  %-16s %6d %6d %6d", host->name, host->ranks, host->cpus_online,
            doctor_host_cpus(facts, h));
    print_value(file, host->local_hop, 9, 1);
    fprintf(file, "  ");
    print_cpus(file, first_rank(facts, h)->cpus);
    fprintf(file, "\n");
  }
  print_more(file, facts);
  if (facts->hop_all > 0)
    fprintf(file,
            "  a hop between %s and %s, all others asleep: %.1f us; round all hosts: %.1f us\n",
            facts->hosts[0].name, facts->hosts[1].name, facts->hop_two, facts->hop_all);
}

static void print_interface(FILE *file, const struct doctor_interface *interface) {
  char address[DOCTOR_ADDRESS], speed[16] = "-";
  if (interface->speed > 0)
    snprintf(speed, sizeof speed, "%d%s", interface->speed, interface->physical ? "" : "*");
  fprintf(file, " %-12s %-15s /%d %6d %8s %-5s %9.2f", interface->name,
          doctor_address(interface->address, address), __builtin_popcount(interface->netmask),
          interface->mtu, speed, interface->up ? "up" : "down",
          (double)interface->sent / (1 << 20));
  if (interface->packets > 0)
    fprintf(file, " %8.0f", (double)interface->sent / (double)interface->packets);
  fprintf(file, "\n");
}

static void print_interfaces(FILE *file, const struct doctor_facts *facts) {
  fprintf(file,
          "\nInterfaces; bytes that they sent while MPI sent %.1f MiB to the next host\n"
          "  %-16s %-12s %-15s %3s %6s %8s %-5s %9s %8s\n",
          (double)facts->bulk / (1 << 20), "host", "interface", "address", "net", "MTU", "Mbit/s",
          "state", "MiB", "a packet");
  for (int h = 0; h < shown(facts); h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      fprintf(file, "  %-16s", facts->hosts[h].name);
      print_interface(file, &facts->hosts[h].interfaces[i]);
    }
  print_more(file, facts);
  fprintf(file, "  * a virtual interface: its speed means nothing\n");
}

static void print_subnets(FILE *file, const struct doctor_facts *facts) {
  fprintf(file,
          "\nSubnets that all hosts share; plain TCP in Gbit/s, the fastest pair of hosts\n"
          "  %-20s %9s %9s %9s\n",
          "subnet", "1 stream", "2 streams", "4 streams");
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *subnet = &facts->subnets[s];
    char network[DOCTOR_ADDRESS];
    double part = doctor_part_of(facts, -1, s);
    fprintf(file, "  %-20s %9.2f %9.2f %9.2f", doctor_network(subnet, network), subnet->rate[0],
            subnet->rate[1], subnet->rate[2]);
    if (part >= 0.01)
      fprintf(file, "  %.0f %% of MPI's traffic", 100 * part);
    fprintf(file, "%s\n", subnet->rate[0] > 0 ? "" : "  no connection: a firewall?");
  }
  if (facts->subnet_count == 0)
    fprintf(file, "  none\n");
  if (doctor_used_subnet(facts) < 0)
    fprintf(file, "  MPI's traffic took none of them: the kernel did not count it (RDMA), or the "
                  "hosts are\n  in different subnets; interfaces cannot be judged\n");
  if (facts->message_streams)
    fprintf(file, "  MPI: %.2f from one rank, %.2f from %d ranks at once\n", facts->one_stream,
            facts->many_streams, facts->message_streams);
}

static void print_matrix(FILE *file, const struct doctor_facts *facts, const char *title,
                         const double *matrix, int digits) {
  fprintf(file, "\n%s\n  %-16s", title, "");
  for (int to = 0; to < shown(facts); to++)
    fprintf(file, " %8.8s", facts->hosts[to].name);
  for (int from = 0; from < shown(facts); from++) {
    fprintf(file, "\n  %-16s", facts->hosts[from].name);
    for (int to = 0; to < shown(facts); to++)
      print_value(file, matrix[from * facts->host_count + to], 8, digits);
  }
  fprintf(file, "\n");
  print_more(file, facts);
}

void doctor_print_facts(FILE *file, const struct doctor_facts *facts) {
  int yields = facts->ranks[0].yields;
  fprintf(file, "%d rank%s on %d host%s; %s; ranks yield when idle: %s\n", facts->rank_count,
          facts->rank_count == 1 ? "" : "s", facts->host_count, facts->host_count == 1 ? "" : "s",
          facts->library_name,
          yields > 0    ? "yes"
          : yields == 0 ? "no"
                        : "the library does not say");
  print_ranks(file, facts);
  print_interfaces(file, facts);
  if (facts->host_count < 2) {
    fprintf(file, "\nOne host: which interface carries the traffic, the speed of the network, slow "
                  "hosts, streams\nand MTUs cannot be measured. Start ranks on two hosts or more "
                  "for that.\n");
    return;
  }
  print_subnets(file, facts);
  print_matrix(file, facts, "MPI bandwidth in Gbit/s, from row to column", facts->bandwidth, 2);
  print_matrix(file, facts, "MPI round trip in us, median", facts->round_trip, 0);
}

void doctor_print_findings(FILE *file, const struct doctor_diagnosis *diagnosis) {
  int all = diagnosis->count + diagnosis->more;
  if (all == 0)
    fprintf(file, "\nNo findings.\n");
  else
    fprintf(file, "\n%d finding%s\n", all, all == 1 ? "" : "s");
  for (int i = 0; i < diagnosis->count; i++) {
    const struct doctor_finding *finding = &diagnosis->findings[i];
    fprintf(file, "%2d. %s\n    why: %s\n    do:  %s\n", i + 1, finding->seen, finding->why,
            finding->set);
  }
  if (diagnosis->more)
    fprintf(file, "    ... and %d more\n", diagnosis->more);
}

/* --- Settings ----------------------------------------------------------------------------------*/

enum { NAMES = 256 }; /* a dozen and more names; a longer list ends early */

static bool has_name(const char *list, const char *name) {
  size_t length = strlen(name);
  for (const char *at = list; (at = strstr(at, name)); at += length)
    if ((at == list || at[-1] == ',') && (at[length] == '\0' || at[length] == ','))
      return true;
  return false;
}

/* The interface's names, with commas where hosts differ; for Open MPI the name, or the subnet. */
static void name_interface(const struct doctor_facts *facts, int subnet, char names[NAMES],
                           char include[NAMES]) {
  names[0] = include[0] = '\0';
  for (int h = 0; subnet >= 0 && h < facts->host_count; h++) {
    const struct doctor_interface *interface = doctor_interface_in(facts, h, subnet);
    size_t used = strlen(names);
    if (interface && !has_name(names, interface->name))
      snprintf(names + used, NAMES - used, "%s%s", used ? "," : "", interface->name);
  }
  if (strchr(names, ','))
    doctor_network(&facts->subnets[subnet], include);
  else
    strcpy(include, names);
}

/* Whether every rank can have a core of its own. */
static bool cores_suffice(const struct doctor_facts *facts) {
  for (int h = 0; h < facts->host_count; h++)
    if (facts->hosts[h].ranks > facts->hosts[h].cpus_online)
      return false;
  return true;
}

/* The variables of Open MPI, each as an option of mpirun and for the environment. */
static void print_variables(FILE *file, const struct doctor_diagnosis *diagnosis,
                            const char *include, const char *option, const char *between) {
  if (diagnosis->set_subnet >= 0)
    fprintf(file, "%sbtl_tcp_if_include%s%s%soob_tcp_if_include%s%s", option, between, include,
            option, between, include);
  if (diagnosis->set_yield)
    fprintf(file, "%smpi_yield_when_idle%s1", option, between);
  if (diagnosis->set_streams)
    fprintf(file, "%sbtl_tcp_links%s%d", option, between, diagnosis->set_streams);
}

static void print_open_mpi(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis, const char *include) {
  bool suffice = cores_suffice(facts);
  fprintf(file, "  mpirun");
  print_variables(file, diagnosis, include, " --mca ", " ");
  fprintf(file, "%s ...\n",
          !diagnosis->set_binding ? ""
          : suffice               ? " --bind-to core"
                                  : " --bind-to none");
  if (diagnosis->set_subnet >= 0 || diagnosis->set_yield || diagnosis->set_streams) {
    fprintf(file, "  export");
    print_variables(file, diagnosis, include, " OMPI_MCA_", "=");
    fprintf(file, "    # the same for srun\n");
  }
  if (diagnosis->set_binding)
    fprintf(file, "  srun --cpu-bind=%s ...\n", suffice ? "cores" : "none");
}

static void print_mpich(FILE *file, const struct doctor_diagnosis *diagnosis, const char *names) {
  if (diagnosis->set_subnet >= 0)
    fprintf(file, "  export HYDRA_IFACE=%s FI_TCP_IFACE=%s\n", names, names);
  if (diagnosis->set_binding)
    fprintf(file, "  mpirun -bind-to core ...\n");
}

static void print_others(FILE *file, const struct doctor_diagnosis *diagnosis, const char *names) {
  bool subnet = diagnosis->set_subnet >= 0;
  if (subnet)
    fprintf(file, "where UCX carries MPI\n  export UCX_NET_DEVICES=%s UCX_TLS=tcp,self,sm\n",
            names);
  fprintf(file, "NCCL on the same hosts\n  export");
  if (subnet)
    fprintf(file, " NCCL_SOCKET_IFNAME==%s NCCL_IB_DISABLE=1", names);
  if (diagnosis->set_streams)
    fprintf(file, " NCCL_SOCKET_NTHREADS=%d NCCL_NSOCKS_PERTHREAD=1", diagnosis->set_streams);
  fprintf(file, "\n");
}

/* What a kind of finding asks for; the others ask for nothing that can be pasted. */
static const char *const settings[DOCTOR_MTU + 1] = {[DOCTOR_SPINNING] = "yield",
                                                     [DOCTOR_SAME_CPU] = "binding",
                                                     [DOCTOR_WRONG_INTERFACE] = "interface",
                                                     [DOCTOR_ODD_INTERFACE] = "interface",
                                                     [DOCTOR_SPREAD] = "interface",
                                                     [DOCTOR_STREAMS_HELP] = "streams"};

void doctor_print_settings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis) {
  char names[NAMES], include[NAMES];
  bool network = diagnosis->set_subnet >= 0 || diagnosis->set_streams;
  if (!network && !diagnosis->set_yield && !diagnosis->set_binding)
    return;
  name_interface(facts, diagnosis->set_subnet, names, include);
  fprintf(file, "\nSettings, and what was measured that asks for them\n");
  for (int i = 0; i < diagnosis->count; i++)
    if (settings[diagnosis->findings[i].kind])
      fprintf(file, "  # %s: %s\n", settings[diagnosis->findings[i].kind],
              diagnosis->findings[i].seen);
  fprintf(file, "%s\n", facts->library_name);
  if (facts->library == DOCTOR_OPEN_MPI)
    print_open_mpi(file, facts, diagnosis, include);
  else if (facts->library == DOCTOR_MPICH)
    print_mpich(file, diagnosis, names);
  if (network)
    print_others(file, diagnosis, names);
}
