/* Prints the doctor's report: tables of measurements, and findings. */
#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

const char *doctor_network(uint32_t address, uint32_t netmask, char text[DOCTOR_ADDRESS]) {
  snprintf(text, DOCTOR_ADDRESS, "%u.%u.%u.%u/%d", address >> 24, address >> 16 & 255,
           address >> 8 & 255, address & 255, __builtin_popcount(netmask));
  return text;
}

/* --- Tables ------------------------------------------------------------------------------------*/

/* The most rows and columns of a table; measurements on further hosts are judged all the same. */
enum { TABLE_HOSTS = 16 };

static int shown(const struct doctor_facts *facts) {
  return facts->host_count < TABLE_HOSTS ? facts->host_count : TABLE_HOSTS;
}

static void print_hosts(FILE *file, const struct doctor_facts *facts) {
  fprintf(
      file,
      "\nRanks; CPUs that other programs use; a hop of a message that goes round the ranks of a "
      "host, in us\n  %-16s %6s %6s %6s %6s %9s\n",
      "host", "ranks", "CPUs", "usable", "others", "hop");
  for (int h = 0; h < shown(facts); h++)
    fprintf(file, "  %-16s %6d %6d %6d %6.1f %9.1f\n", facts->hosts[h].name, facts->hosts[h].ranks,
            facts->hosts[h].cpus_online, facts->hosts[h].usable, facts->hosts[h].others,
            facts->hosts[h].local_hop);
}

static void print_interfaces(FILE *file, const struct doctor_facts *facts) {
  char network[DOCTOR_ADDRESS];
  fprintf(file,
          "\nInterfaces (* virtual: its speed means nothing); MiB that they sent while MPI sent "
          "%.1f MiB\n  %-16s %-12s %-18s %6s %8s %-5s %9s\n",
          (double)facts->bulk / (1 << 20), "host", "interface", "address", "MTU", "Mbit/s", "state",
          "MiB");
  for (int h = 0; h < shown(facts); h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      fprintf(file, "  %-16s %-12s %-18s %6d %7d%c %-5s %9.2f\n", facts->hosts[h].name, one->name,
              doctor_network(one->address, one->netmask, network), one->mtu, one->speed,
              one->physical ? ' ' : '*', one->up ? "up" : "down", (double)one->sent / (1 << 20));
    }
}

static void print_subnets(FILE *file, const struct doctor_facts *facts) {
  char network[DOCTOR_ADDRESS];
  fprintf(file,
          "\nSubnets that all hosts share; plain TCP in one stream, the fastest pair of hosts\n"
          "  %-20s %9s  of MPI's traffic\n",
          "subnet", "Gbit/s");
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *subnet = &facts->subnets[s];
    fprintf(file, "  %-20s %9.2f  %.0f %%%s\n",
            doctor_network(subnet->network, subnet->netmask, network), subnet->tcp,
            100 * doctor_part_of(facts, -1, s),
            subnet->tcp > 0 ? "" : "  no connection: a firewall?");
  }
  if (doctor_used_subnet(facts) < 0)
    fprintf(file, "  MPI's traffic took none of them: the kernel did not count it (RDMA), or the "
                  "hosts are\n  in different subnets; interfaces cannot be judged\n");
}

static void print_matrix(FILE *file, const struct doctor_facts *facts, const char *title,
                         const double *matrix, int digits) {
  fprintf(file, "\n%s\n  %-16s", title, "");
  for (int to = 0; to < shown(facts); to++)
    fprintf(file, " %8.8s", facts->hosts[to].name);
  for (int from = 0; from < shown(facts); from++) {
    fprintf(file, "\n  %-16s", facts->hosts[from].name);
    for (int to = 0; to < shown(facts); to++)
      fprintf(file, " %8.*f", digits, matrix[from * facts->host_count + to]);
  }
  fprintf(file, "\n");
}

void doctor_print_facts(FILE *file, const struct doctor_facts *facts) {
  static const char *const answers[] = {"the library does not say", "no", "yes"};
  fprintf(file, "%d rank%s on %d host%s; %s; ranks yield when idle: %s\n",
          TUNE_COUNTED(facts->rank_count), TUNE_COUNTED(facts->host_count), facts->library,
          answers[facts->yields + 1]);
  print_hosts(file, facts);
  print_interfaces(file, facts);
  if (facts->host_count < 2) {
    fprintf(file, "\nOne host: which interface carries the traffic, the speed of the network, slow "
                  "hosts\nand MTUs cannot be measured. Start ranks on two hosts or more "
                  "for that.\n");
    return;
  }
  print_subnets(file, facts);
  print_matrix(file, facts, "MPI bandwidth in Gbit/s, from row to column", facts->bandwidth, 2);
  print_matrix(file, facts, "MPI round trip in us, median", facts->round_trip, 0);
  if (facts->host_count > TABLE_HOSTS)
    fprintf(file, "  ... and %d more hosts\n", facts->host_count - TABLE_HOSTS);
}

/* --- Findings ----------------------------------------------------------------------------------*/

/* clang-format off */
static const struct {
  const char *why, *advice;
  bool sure; /* no time is in it: measuring again cannot change it */
} texts[] = {
    [DOCTOR_BUSY] = {"times measure the processors, not the network: no host is judged by them",
        "end the other programs, or give ranks cores of their own; then again", false},
    [DOCTOR_STOLEN] = {"ranks are stopped at any moment: no host is judged by times",
        "a container's cpu.max, or another instance type; then again", false},
    [DOCTOR_SPINNING] = {"ranks that wait keep the processors from those that have work",
        "mpirun --mca mpi_yield_when_idle 1, or no more ranks than processors", false},
    [DOCTOR_SAME_CPU] = {"they take turns on it while other CPUs are idle",
        "mpirun --bind-to none, or bind every rank to a core of its own", true},
    [DOCTOR_DOWN] = {"a subnet that not all hosts have carries no exchange",
        "its cable, or there: ip link set dev INTERFACE up", true},
    [DOCTOR_DUPLEX] = {"a link that cannot send while it receives loses packets under load",
        "negotiation at both ends of the cable: ethtool -s INTERFACE autoneg on", true},
    [DOCTOR_NEGOTIATED] = {"every exchange waits for the slowest link",
        "its cable and switch port: ethtool INTERFACE there", true},
    [DOCTOR_SLOW_HOST] = {"every exchange waits for the slowest host",
        "its link, cable or switch port, or a limit on its rate: ethtool and tc qdisc show there",
        false},
    [DOCTOR_SLOW_PAIR] = {"exchanges that use this way wait for it",
        "the way between these two: links (ethtool on both), switches, cables, routing", false},
    [DOCTOR_LATE_HOST] = {"small messages wait for it",
        "its way to the others (switches, routing), power saving or load on it", false},
    [DOCTOR_WRONG_INTERFACE] = {"every exchange takes as long as the slower one needs",
        "let MPI use the faster one alone", false},
    [DOCTOR_ODD_INTERFACE] = {"its way to the others is another one, and may be a slower one",
        "name the interface, the same on every host; its routes if it is named: ip route there",
        false},
    [DOCTOR_MPI_SLOW] = {"the network carries more than MPI sends over it",
        "what MPI takes: mpirun --mca pml ob1 --mca btl tcp,self,vader; UCX_NET_DEVICES; a VPN",
        false},
    [DOCTOR_FIREWALL] = {"MPI's own ports may be open, but others that programs choose are not",
        "open the ports between the hosts", false},
    [DOCTOR_MTU] = {"packets larger than the other side takes are lost silently",
        "ip link set dev INTERFACE mtu MTU there, as on the others", true},
    [DOCTOR_LINK_SPEED] = {"something between the hosts, or on them, holds the traffic back",
        "errors in ethtool -S, other traffic, a slower switch; iperf3 -P 4: several streams",
        false},
    [DOCTOR_BRIDGE] = {"a library may take it for a network of all hosts, and wait for ever",
        "--mca btl_tcp_if_exclude lo,NAME; oob_tcp_if_exclude; NCCL_SOCKET_IFNAME=^NAME", true},
    [DOCTOR_LOOPBACK_NAME] =
        {"gloo and MPICH look the name up, and others then connect to themselves",
        "its real address in /etc/hosts, or the interface: GLOO_SOCKET_IFNAME, HYDRA_IFACE", true},
    [DOCTOR_CLOCK] = {"files, certificates and logs of several hosts contradict each other",
        "chronyc or ntpd there", true},
};
/* clang-format on */

bool doctor_is_sure(const struct doctor_finding *finding) { return texts[finding->kind].sure; }

/* Prints how MPI and NCCL are kept to a subnet. */
static void print_setting(FILE *file, const struct doctor_facts *facts, int subnet) {
  const struct doctor_subnet *in = &facts->subnets[subnet];
  const char *name = doctor_interface_in(facts, 0, subnet)->name;
  char text[DOCTOR_ADDRESS];
  doctor_network(in->network, in->netmask, text);
  fprintf(file,
          "         Open MPI: mpirun --mca btl_tcp_if_include %s --mca oob_tcp_if_include %s\n"
          "         else, where %s is its name: HYDRA_IFACE=%s FI_TCP_IFACE=%s (MPICH),\n"
          "         UCX_NET_DEVICES=%s UCX_TLS=tcp,self,sm, NCCL_SOCKET_IFNAME==%s "
          "NCCL_IB_DISABLE=1\n",
          text, text, name, name, name, name, name);
}

void doctor_print_findings(FILE *file, const struct doctor_facts *facts,
                           const struct doctor_diagnosis *diagnosis) {
  const int all = diagnosis->count + diagnosis->more;
  int subnet = diagnosis->set_subnet;
  if (all == 0)
    fprintf(file, "\nNo findings.\n");
  else
    fprintf(file, "\n%d finding%s\n", TUNE_COUNTED(all));
  for (int i = 0; i < diagnosis->count; i++) {
    const struct doctor_finding *finding = &diagnosis->findings[i];
    fprintf(file, "%2d. %s\n    why: %s\n    do:  %s\n", i + 1, finding->seen,
            texts[finding->kind].why, texts[finding->kind].advice);
    if (subnet >= 0 &&
        (finding->kind == DOCTOR_WRONG_INTERFACE || finding->kind == DOCTOR_ODD_INTERFACE)) {
      print_setting(file, facts, subnet);
      subnet = -1;
    }
  }
  if (diagnosis->more)
    fprintf(file, "    ... and %d more\n", diagnosis->more);
}
