"""torchkin, of Theseus: Jacobians of a robot's forward kinematics."""

import tempfile
from pathlib import Path

import torch
import torchkin

JOINT = """
<link name="link_{i}"/>
<joint name="joint_{i}" type="revolute">
  <parent link="link_{p}"/><child link="link_{i}"/>
  <origin xyz="0.1 0.{i} 0.3" rpy="0.{i} 0.2 -0.1"/><axis xyz="0 {y} {z}"/>
  <limit lower="-3" upper="3" effort="1" velocity="1"/>
</joint>
"""


def make():
    joints = "".join(JOINT.format(i=i, p=i - 1, y=i % 2, z=1 - i % 2) for i in range(1, 6))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "robot.urdf"
        path.write_text(f'<robot name="arm"><link name="link_0"/>{joints}</robot>')
        robot = torchkin.Robot.from_urdf_file(str(path), torch.float64)
    kinematics, *_ = torchkin.get_forward_kinematics_fns(robot, ["link_5"])
    angles = torch.rand(12, robot.dof, dtype=torch.float64)
    target = torch.rand(3, dtype=torch.float64)

    def position(angles):
        return kinematics(angles[None])[0][0, :, 3]

    def distance(angles):
        return (position(angles) - target).square().sum()

    def run():
        return [
            torch.func.vmap(torch.func.jacrev(position))(angles),
            torch.func.vmap(torch.func.grad(distance))(angles),
        ]

    return run
