/* Prints the doctor's report: tables of measurements, and findings. */
#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

const char *doctor_format_network(uint32_t address, uint32_t netmask, char text[DOCTOR_ADDRESS]) {
  snprintf(text, DOCTOR_ADDRESS, "%u.%u.%u.%u/%d", address >> 24, address >> 16 & 255,
           address >> 8 & 255, address & 255, __builtin_popcount(netmask));
  return text;
}

/* --- Tables ------------------------------------------------------------------------------------*/

/* The largest number of hosts in a table. Further hosts are judged, but not printed. */
enum { TABLE_HOSTS = 16 };

static int count_shown_hosts(const struct doctor_facts *facts) {
  return facts->host_count < TABLE_HOSTS ? facts->host_count : TABLE_HOSTS;
}

static void print_hosts(FILE *file, const struct doctor_facts *facts) {
  fprintf(file,
          "\nRanks; CPUs that other programs use; time per hop of a message that goes round the "
          "ranks of a host, in us\n  %-16s %6s %6s %6s %6s %9s\n",
          "host", "ranks", "CPUs", "usable", "others", "hop");
  for (int h = 0; h < count_shown_hosts(facts); h++)
    fprintf(file, "  %-16s %6d %6d %6d %6.1f %9.1f\n", facts->hosts[h].name, facts->hosts[h].ranks,
            facts->hosts[h].cpus_online, facts->hosts[h].usable, facts->hosts[h].others,
            facts->hosts[h].local_hop);
}

static void print_interfaces(FILE *file, const struct doctor_facts *facts) {
  char network[DOCTOR_ADDRESS], speed[16];
  fprintf(file,
          "\nInterfaces (? unknown; * virtual: its speed means nothing); MiB that they sent while "
          "MPI sent "
          "%.1f MiB\n  %-16s %-12s %-18s %6s %8s %-5s %9s\n",
          (double)facts->bulk / (1 << 20), "host", "interface", "address", "MTU", "Mbit/s", "state",
          "MiB");
  for (int h = 0; h < count_shown_hosts(facts); h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      snprintf(speed, sizeof speed, one->speed > 0 ? "%d%s" : "?%.0d%s",
               one->speed > 0 ? one->speed : 0, one->physical ? " " : "*");
      fprintf(file, "  %-16s %-12s %-18s %6d %8s %-5s %9.2f\n", facts->hosts[h].name, one->name,
              doctor_format_network(one->address, one->netmask, network), one->mtu, speed,
              one->up ? "up" : "down", (double)one->sent / (1 << 20));
    }
}

static void print_subnets(FILE *file, const struct doctor_facts *facts) {
  char network[DOCTOR_ADDRESS];
  fprintf(file,
          "\nSubnets that all hosts share; rate of plain TCP in one stream, between the fastest "
          "pair of hosts\n  %-20s %10s  share of MPI's bytes\n",
          "subnet", "TCP Gbit/s");
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *subnet = &facts->subnets[s];
    fprintf(file, "  %-20s %10.2f  %.0f %%%s\n",
            doctor_format_network(subnet->network, subnet->netmask, network), subnet->tcp,
            100 * doctor_traffic_part(facts, -1, s),
            subnet->tcp > 0 ? "" : "  no connection: a firewall?");
  }
  if (doctor_used_subnet(facts) < 0)
    fprintf(file, "  MPI's traffic took none of these subnets: the kernel did not count it (RDMA), "
                  "or the hosts\n  are in different subnets; interfaces cannot be judged\n");
}

static void print_bandwidths(FILE *file, const struct doctor_facts *facts) {
  fprintf(file, "\nMPI bandwidth in Gbit/s, from row to column\n  %-16s", "");
  for (int to = 0; to < count_shown_hosts(facts); to++)
    fprintf(file, " %8.8s", facts->hosts[to].name);
  for (int from = 0; from < count_shown_hosts(facts); from++) {
    fprintf(file, "\n  %-16s", facts->hosts[from].name);
    for (int to = 0; to < count_shown_hosts(facts); to++)
      fprintf(file, " %8.2f", facts->bandwidth[from * facts->host_count + to]);
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
    fprintf(file, "\nAll ranks are on one host, so the interface that carries the traffic, the "
                  "network's speed, slow\nhosts and MTUs cannot be measured. Start ranks on two or "
                  "more hosts to measure them.\n");
    return;
  }
  print_subnets(file, facts);
  print_bandwidths(file, facts);
  if (facts->host_count > TABLE_HOSTS)
    fprintf(file, "  ... and %d more hosts\n", facts->host_count - TABLE_HOSTS);
}

/* --- Findings ----------------------------------------------------------------------------------*/

/* Prints the settings that restrict MPI and NCCL to a subnet. */
static void print_setting(FILE *file, const struct doctor_facts *facts, int subnet) {
  const struct doctor_subnet *in = &facts->subnets[subnet];
  const char *name = doctor_find_interface(facts, 0, subnet)->name;
  char text[DOCTOR_ADDRESS];
  doctor_format_network(in->network, in->netmask, text);
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
  if (all == 0)
    fprintf(file, "\nNo findings.\n");
  else
    fprintf(file, "\n%d finding%s\n", TUNE_COUNTED(all));
  for (int i = 0; i < diagnosis->count; i++) {
    const struct doctor_finding *finding = &diagnosis->findings[i];
    fprintf(file, "%2d. %s\n    why: %s\n    do:  %s\n", i + 1, finding->seen, finding->why,
            finding->advice);
    if (finding->subnet >= 0)
      print_setting(file, facts, finding->subnet);
  }
  if (diagnosis->more)
    fprintf(file, "    ... and %d more\n", diagnosis->more);
}
