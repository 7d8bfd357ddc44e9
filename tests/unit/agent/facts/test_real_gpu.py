"""The comparison with nvidia-smi that is made where there is a real card."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks import real_gpu
from tests.driver.driver import Driver, cards
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.facts.gpu import all_facts

PRINTED = f"""
<gpu id="00000000:18:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <uuid>{cards(1)[0].uuid}</uuid>
  <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
  <fb_memory_usage><total>81920 MiB</total><reserved>1024 MiB</reserved><used>0 MiB</used></fb_memory_usage>
  <utilization><gpu_util>0 %</gpu_util><memory_util>0 %</memory_util></utilization>
  <remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc></remapped_rows>
  <temperature>
    <gpu_temp>38 C</gpu_temp><gpu_temp_slow_threshold>89 C</gpu_temp_slow_threshold><memory_temp>44 C</memory_temp>
  </temperature>
  <gpu_power_readings>
    <power_draw>70.00 W</power_draw><current_power_limit>700.00 W</current_power_limit>
    <default_power_limit>700.00 W</default_power_limit>
    <min_power_limit>200.00 W</min_power_limit><max_power_limit>700.00 W</max_power_limit>
  </gpu_power_readings>
  <clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
  <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
  </clocks_event_reasons>
</gpu>"""


def test_every_value_is_compared_and_a_wrong_one_is_found(driver: Driver) -> None:
    """The fake has exactly the printed values; then one number differs."""
    gpus = NvmlGpus()
    told = all_facts(gpus)["gpus"][0]
    gpus.close()
    right = ElementTree.fromstring(PRINTED)
    results = list(real_gpu.compare(told, right, right))
    assert [one for one in results if not one.agrees] == []
    assert {"throttle_reasons.gpu_idle", *real_gpu.NUMBERS} <= {one.name for one in results}
    wrong = ElementTree.fromstring(PRINTED.replace("89 C", "92 C").replace("Not Active", "Active"))
    wrongs = [one.name for one in real_gpu.compare(told, wrong, wrong) if not one.agrees]
    assert wrongs == ["slowdown_celsius", "throttle_reasons.sw_power_cap"]


def test_the_comparison_cannot_change_settings() -> None:
    """It calls no function that sets a limit."""
    tree = ast.parse(Path(real_gpu.__file__).read_text())
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not [name for name in named if name.startswith(("set_", "nvml"))]
